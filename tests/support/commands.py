"""Runs `millstream …`: in this process, which is quick, or as a user does, in one of its own."""

from __future__ import annotations

import io
import json
import os
from typing import Any, NamedTuple
from unittest import mock

from millstream.cli.main import main
from support.server import PYTHON


class Done(NamedTuple):
    returncode: int
    stdout: bytes
    stderr: bytes


def environment(url: str | None = None, **more: str) -> dict[str, str]:
    """The environment without what the user may have set, and with the server's address."""
    inherited = {
        name: value for name, value in os.environ.items() if not name.startswith("MILLSTREAM_") and name != "NO_COLOR"
    }
    return {**inherited, **({"MILLSTREAM_URL": url} if url is not None else {}), **more}


def command_line(*arguments: str) -> list[str]:
    return [PYTHON, "-m", "millstream", *arguments]


def millstream(*arguments: str, url: str | None = None, stdin: bytes = b"", **more: str) -> Done:
    """The command in this process, with standard streams of its own."""
    streams = [io.TextIOWrapper(io.BytesIO(content), encoding="utf-8") for content in (stdin, b"", b"")]
    with (
        mock.patch.dict(os.environ, environment(url, **more), clear=True),
        mock.patch("sys.stdin", streams[0]),
        mock.patch("sys.stdout", streams[1]),
        mock.patch("sys.stderr", streams[2]),
    ):
        try:
            code = main(arguments)
        except SystemExit as refused:  # argparse leaves this way
            code = int(refused.code or 0)
    written = []
    for stream in streams[1:]:
        stream.flush()
        buffer = stream.buffer
        assert isinstance(buffer, io.BytesIO)
        written.append(buffer.getvalue())
    return Done(code, written[0], written[1])


def output_of(*arguments: str, url: str | None = None, stdin: bytes = b"") -> str:
    """What a command prints that succeeds without a word on standard error."""
    done = millstream(*arguments, url=url, stdin=stdin)
    assert (done.returncode, done.stderr) == (0, b""), done
    return done.stdout.decode()


def json_of(*arguments: str, url: str | None = None, stdin: bytes = b"") -> Any:
    return json.loads(output_of(*arguments, "--json", url=url, stdin=stdin))
