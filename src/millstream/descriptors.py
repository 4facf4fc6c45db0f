"""Open files that have an owner. Knows the operating system alone."""

from __future__ import annotations

import os
from pathlib import Path


class Descriptor:
    """An open file, closed exactly once.

    A number that is closed twice may by then be another's: somebody's log, or the socket that the server listens on.
    So nobody closes a number; whoever opened a file holds one of these, and `close` forgets the number first, also
    where the operating system reports an error (on Linux the file is closed all the same).
    """

    __slots__ = ("_number",)

    def __init__(self, path: Path, flags: int, mode: int = 0o640) -> None:
        self._number = os.open(path, flags | os.O_CLOEXEC, mode)

    @property
    def number(self) -> int:
        """For a system call, at once; never to be kept. -1 if the file is closed."""
        return self._number

    def close(self) -> None:
        """Close the file; harmless if that has happened."""
        number, self._number = self._number, -1
        if number >= 0:
            os.close(number)
