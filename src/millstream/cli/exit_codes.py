"""The exit codes of commands; docs/cli.md lists them from here."""

from __future__ import annotations

from typing import Final

from millstream import errors
from millstream.client.errors import (
    ConnectionFailed,
    Forbidden,
    Gone,
    NotFound,
    ProducerFenced,
    Unauthorized,
    Unavailable,
)
from millstream.errors import MillstreamError

OK: Final = 0
FAILED: Final = 1
USAGE: Final = 2
MISSING: Final = 3
NOT_ALLOWED: Final = 4
UNREACHABLE: Final = 5
INTERRUPTED: Final = 130
BROKEN_PIPE: Final = 141

MEANINGS: Final = {
    OK: "it worked",
    FAILED: "it did not, or a check found something wrong; standard error says what, and what to do",
    USAGE: "the command line is wrong",
    MISSING: "there is no such stream, bucket, snapshot, node, token or object store, or no longer",
    NOT_ALLOWED: "the token is missing, wrong or does not allow it",
    UNREACHABLE: "the server or the object store cannot be reached, or is not ready",
    INTERRUPTED: "interrupted with Ctrl-C",
    BROKEN_PIPE: "whoever read the output went away",
}


def exit_code_of(error: MillstreamError) -> int:
    if isinstance(error, NotFound | Gone | errors.NotFound | errors.Gone):
        return MISSING
    if isinstance(error, Unauthorized | Forbidden | ProducerFenced):
        return NOT_ALLOWED
    if isinstance(error, ConnectionFailed | Unavailable | errors.Unavailable):
        return UNREACHABLE
    return FAILED
