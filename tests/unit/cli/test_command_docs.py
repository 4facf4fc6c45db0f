"""docs/cli.md says what the commands say, and every command says something."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest
from scripts.command_docs import render

from millstream import cli
from millstream.cli.main import COMMANDS, build_parser
from millstream.cli.tree import Command, commands

DOCUMENT = Path(__file__).parents[3] / "docs" / "cli.md"
ALL = list(commands(build_parser()))
LEAVES = [command for command in ALL if command.path and not command.subcommands]


def test_command_reference_is_up_to_date() -> None:
    assert DOCUMENT.read_text() == render(), "run make generate"


def test_every_module_that_has_a_command_is_a_command() -> None:
    folder = Path(cli.__file__).parent
    modules = {path.stem for path in folder.glob("*.py") if "def add_parser(" in path.read_text()}
    assert modules == set(COMMANDS) == {command.path[0] for command in ALL if command.path}


@pytest.mark.parametrize("command", LEAVES, ids=lambda command: "-".join(command.path))
def test_a_command_and_its_options_are_documented(command: Command) -> None:
    _, found, rest = DOCUMENT.read_text().partition(f"\n## {command.name}\n")
    section = rest.partition("\n## ")[0]
    assert found and command.description in section and command.help
    for option in command.options:
        assert option.help, f"{command.name} {option.flags or option.metavar} has no help"
        if option.group != "connection" and "--help" not in option.flags:
            assert option.help.replace("|", "\\|") in section
            assert all(flag in section for flag in option.flags)


@pytest.mark.parametrize("command", LEAVES, ids=lambda command: "-".join(command.path))
def test_an_example_can_be_typed_as_it_stands(command: Command) -> None:
    if command.example is not None:
        typed = re.search(r"\bmillstream ([^|)]*)", command.example)
        assert typed is not None
        build_parser().parse_args(shlex.split(typed[1]))
