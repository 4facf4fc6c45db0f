"""Completion scripts, asked by the shells they are for."""

from __future__ import annotations

import contextlib
import io
import shutil
import subprocess
from pathlib import Path

import pytest

from millstream.cli.main import COMMANDS, build_parser, main
from millstream.cli.tree import commands

SHELLS = ("bash", "zsh", "fish")

# In zsh and bash the completion function is called as the shell would; zsh's own part in it is played by two functions.
ASK = {
    "bash": 'source "$1"; shift; COMP_WORDS=("$@"); COMP_CWORD=$(($# - 1)); _millstream;'
    ' printf "%s\\n" "${COMPREPLY[@]}"',
    "zsh": "compdef() { :; }; compadd() { shift; print -l -- ${(M)@:#${words[CURRENT]}*}; }; _files() { print FILES; };"
    ' source "$1"; shift; words=("$@"); CURRENT=$#; _millstream',
    "fish": 'source $argv[1]; complete -C (string join " " -- $argv[2..-1])',
}


def script(shell: str) -> str:
    output = io.StringIO()
    with contextlib.redirect_stdout(output):
        assert main(["completion", shell]) == 0
    return output.getvalue()


def complete(shell: str, folder: Path, *words: str) -> list[str]:
    if shutil.which(shell) is None:
        pytest.skip(f"{shell} is not installed")
    file = folder / shell
    file.write_text(script(shell))
    command = [shell, "-c", ASK[shell], str(file)] if shell == "fish" else [shell, "-c", ASK[shell], shell, str(file)]
    shown = subprocess.run([*command, *words], capture_output=True, text=True, timeout=30, cwd=folder)
    assert shown.stderr == ""
    return [line.partition("\t")[0] for line in shown.stdout.splitlines() if line]


@pytest.mark.parametrize("shell", SHELLS)
def test_commands_and_their_options_are_offered(shell: str, tmp_path: Path) -> None:
    assert set(complete(shell, tmp_path, "millstream", "")) >= set(COMMANDS)
    assert complete(shell, tmp_path, "millstream", "sta") == ["status"]
    assert set(complete(shell, tmp_path, "millstream", "streams", "")) >= {"ls", "append", "tail", "fork"}
    assert complete(shell, tmp_path, "millstream", "streams", "tail", "x", "--mo") == ["--mode"]
    assert set(complete(shell, tmp_path, "millstream", "streams", "tail", "--mode", "")) == {"auto", "sse", "long-poll"}
    assert set(complete(shell, tmp_path, "millstream", "completion", "")) >= set(SHELLS)


def test_files_are_offered_where_an_option_takes_one(tmp_path: Path) -> None:
    (tmp_path / "some.toml").write_text("")
    assert complete("bash", tmp_path, "millstream", "serve", "--config", "so") == ["some.toml"]


@pytest.mark.parametrize("shell", SHELLS)
def test_nothing_is_left_out(shell: str) -> None:
    text = script(shell)
    for command in commands(build_parser()):
        for option in command.options:
            for flag in option.flags:
                assert (f"-l {flag[2:]}" if shell == "fish" and flag.startswith("--") else flag.lstrip("-")) in text
        assert all(name in text for name in command.subcommands)
