"""The command line as data: every command with its options, from argparse, for the reference and completion."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from typing import NamedTuple


class Option(NamedTuple):
    """One option or, without flags, one positional argument."""

    flags: tuple[str, ...]
    metavar: str | None
    help: str
    choices: tuple[str, ...]
    is_required: bool
    is_file: bool
    group: str | None


class Command(NamedTuple):
    """`path` is what is typed after `millstream`; a command with subcommands does nothing by itself."""

    path: tuple[str, ...]
    help: str
    description: str
    example: str | None
    options: tuple[Option, ...]
    subcommands: tuple[str, ...]

    @property
    def name(self) -> str:
        return " ".join(("millstream", *self.path))


def commands(parser: argparse.ArgumentParser, path: tuple[str, ...] = (), help: str = "") -> Iterator[Command]:
    """The parser's own command, then its subcommands."""
    below = _subparsers(parser)
    yield Command(
        path,
        help,
        parser.description or help,
        parser.epilog.removeprefix("example: ") if parser.epilog else None,
        tuple(_options(parser)),
        tuple(below),
    )
    for name, (child, explanation) in below.items():
        yield from commands(child, (*path, name), explanation)


def _subparsers(parser: argparse.ArgumentParser) -> dict[str, tuple[argparse.ArgumentParser, str]]:
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            helps = {choice.dest: choice.help or "" for choice in action._choices_actions}
            return {name: (child, helps.get(name, "")) for name, child in action.choices.items()}
    return {}


def _options(parser: argparse.ArgumentParser) -> Iterator[Option]:
    titles = {id(action): group.title for group in parser._action_groups for action in group._group_actions}
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            continue
        metavar = action.metavar if isinstance(action.metavar, str) else None
        choices = tuple(str(choice) for choice in action.choices or ())
        if action.nargs != 0 and metavar is None:
            metavar = "|".join(choices) or action.dest.upper()
        yield Option(
            tuple(action.option_strings),
            _repeated(metavar, action.nargs) if action.nargs != 0 else None,
            action.help or "",
            choices,
            action.required,
            metavar in ("FILE", "DIR"),
            titles.get(id(action)),
        )


def _repeated(metavar: str | None, nargs: int | str | None) -> str | None:
    if metavar is None:
        return None
    return {"?": f"[{metavar}]", "+": f"{metavar}…", "*": f"[{metavar}…]"}.get(str(nargs), metavar)
