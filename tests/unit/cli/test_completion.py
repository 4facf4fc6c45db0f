"""Completion scripts offer every command and option there is."""

from __future__ import annotations

from pathlib import Path

import pytest

from millstream.cli.main import COMMANDS, build_parser
from millstream.cli.tree import commands
from support.shells import SHELLS, complete, script


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
