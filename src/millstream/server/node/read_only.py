"""A data directory for reading only: `millstream restore --read-only` has marked it, or `server.read_only` says so.

A server on it serves what was restored. It accepts no writes, owns no part of the object store, and has no way to
change anything there: the store itself refuses (`Objects.read_only`).
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
