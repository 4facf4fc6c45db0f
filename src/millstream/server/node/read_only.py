"""Read-only data directories: marked by `millstream restore --read-only`, or configured by `server.read_only`.

A server on such a directory serves what was restored. It accepts no writes, owns no part of the object store, and
cannot change anything there: `Objects.read_only` refuses it.
"""

from __future__ import annotations

from pathlib import Path
from typing import Final

from millstream.errors import ReadOnly

_MARK: Final = "read-only"
_TEXT: Final = """This data directory was made by `millstream restore --read-only`.
A server that is started on it refuses writes, and changes nothing in the object store.
"""


def mark_read_only(data_dir: Path, is_read_only: bool) -> None:
    if is_read_only:
        (data_dir / _MARK).write_text(_TEXT)
    else:
        (data_dir / _MARK).unlink(missing_ok=True)


def is_read_only(data_dir: Path) -> bool:
    return (data_dir / _MARK).exists()


def refusal() -> ReadOnly:
    return ReadOnly(
        "this server is for reading only: `server.read_only` is set, or `millstream restore --read-only` made its data",
        hint="for a server that accepts writes, restore into another data directory without --read-only, or unset it",
        retry_after_seconds=3600,
    )
