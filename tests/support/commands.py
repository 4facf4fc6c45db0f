"""Runs `millstream …` as a user does, in a process of its own."""

from __future__ import annotations

import json
import os
import subprocess
from typing import Any

from support.server import PYTHON


def environment(url: str | None = None, **more: str) -> dict[str, str]:
    """The environment without what the user may have set, and with the server's address."""
    inherited = {
        name: value for name, value in os.environ.items() if not name.startswith("MILLSTREAM_") and name != "NO_COLOR"
    }
    return {**inherited, **({"MILLSTREAM_URL": url} if url is not None else {}), **more}


def command_line(*arguments: str) -> list[str]:
    return [PYTHON, "-m", "millstream.cli.main", *arguments]


def millstream(
    *arguments: str, url: str | None = None, stdin: bytes = b"", **more: str
) -> subprocess.CompletedProcess[bytes]:
    return subprocess.run(
        command_line(*arguments), input=stdin, capture_output=True, timeout=60, env=environment(url, **more)
    )


def output_of(*arguments: str, url: str | None = None, stdin: bytes = b"") -> str:
    """What a command prints that succeeds without a word on standard error."""
    done = millstream(*arguments, url=url, stdin=stdin)
    assert (done.returncode, done.stderr) == (0, b""), (done.stdout, done.stderr)
    return done.stdout.decode()


def json_of(*arguments: str, url: str | None = None, stdin: bytes = b"") -> Any:
    return json.loads(output_of(*arguments, "--json", url=url, stdin=stdin))
