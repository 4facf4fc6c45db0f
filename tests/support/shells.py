"""Completion scripts, asked by the shells they are for."""

from __future__ import annotations

import contextlib
import io
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from millstream.cli.main import main
from support.commands import environment

SHELLS = ("bash", "zsh", "fish")

# In zsh and bash the completion function is called as the shell would; zsh's own part in it is played by two functions.
_ASK = {
    "bash": 'source "$1"; shift; COMP_WORDS=("$@"); COMP_CWORD=$(($# - 1)); _millstream;'
    ' printf "%s\\n" "${COMPREPLY[@]}"',
    "zsh": "compdef() { :; }; _files() { print FILES; }; compadd() { while [[ $1 != -- ]]; do shift; done; shift;"
    " print -l -- ${(M)@:#${words[CURRENT]}*}; };"
    ' source "$1"; shift; words=("$@"); CURRENT=$#; _millstream',
    "fish": 'source $argv[1]; complete -C (string join " " -- $argv[2..-1])',
}


def script(shell: str) -> str:
    output = io.StringIO()
    with contextlib.redirect_stdout(output):
        assert main(["completion", shell]) == 0
    return output.getvalue()


def complete(shell: str, folder: Path, *words: str, url: str | None = None) -> list[str]:
    """What the shell offers for the last of the words."""
    if shutil.which(shell) is None:
        pytest.skip(f"{shell} is not installed")
    file = folder / shell
    file.write_text(script(shell))
    command = [shell, "-c", _ASK[shell], *([] if shell == "fish" else [shell]), str(file), *words]
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    shown = subprocess.run(
        command, capture_output=True, text=True, timeout=60, cwd=folder, env=environment(url, PATH=path)
    )
    assert shown.stderr == ""
    return [line.partition("\t")[0] for line in shown.stdout.splitlines() if line]
