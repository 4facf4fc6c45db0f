"""The command-line reference, made from the commands themselves: `make generate`."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path

from millstream.cli.exit_codes import MEANINGS
from millstream.cli.main import build_parser
from millstream.cli.remote import CONNECTION
from millstream.cli.tree import Command, Option, commands

HEADER = """# Command line

Generated from the commands; do not edit. `millstream COMMAND --help` says the same.

Results go to standard output, everything else to standard error. With `--json` results and errors are JSON. Colours
appear on a terminal only, and never if `NO_COLOR` is set; so do progress bars. `-` stands for standard input.
"""


def render() -> str:
    found = list(commands(build_parser()))
    lines = [HEADER, "| command | |", "|---|---|"]
    lines += [f"| [`{one.name}`](#{_anchor(one)}) | {one.help} |" for one in found if _is_leaf(one)]
    lines += _connection(found)
    for command in found:
        if _is_leaf(command):
            lines += _section(command)
    lines += ["\n## Exit codes\n", "| code | meaning |", "|---|---|"]
    lines += [f"| {code} | {meaning} |" for code, meaning in MEANINGS.items()]
    return "\n".join(lines) + "\n"


def _is_leaf(command: Command) -> bool:
    return bool(command.path) and not command.subcommands


def _anchor(command: Command) -> str:
    return command.name.replace(" ", "-")


def _connection(found: Iterable[Command]) -> Iterator[str]:
    """What all commands that talk to a server take, said once."""
    options = next(
        [option for option in command.options if option.group == CONNECTION]
        for command in found
        if any(option.group == CONNECTION for option in command.options)
    )
    yield "\n## Connection\n"
    yield "Commands that talk to a server take these. Prefer the environment for tokens: others can see arguments.\n"
    yield from _table(options)


def _section(command: Command) -> Iterator[str]:
    yield f"\n## {command.name}\n"
    own = [option for option in command.options if option.group != CONNECTION and "--help" not in option.flags]
    own.sort(key=lambda option: (bool(option.flags), "--json" in option.flags))
    positional = [option for option in own if not option.flags]
    required = [f"{option.flags[0]} {option.metavar}" for option in own if option.flags and option.is_required]
    usage = [command.name, *(option.metavar or "" for option in positional), *required]
    has_more = any(option.flags and not option.is_required for option in own)
    yield f"`{' '.join([*usage, '[options]'] if has_more else usage)}`\n"
    yield f"{command.description}"
    if len(own) != len([option for option in command.options if "--help" not in option.flags]):
        yield "Takes the [connection options](#connection)."
    if own:
        yield ""
        yield from _table(own)
    if command.example:
        yield f"\n```sh\n{command.example}\n```"


def _table(options: Iterable[Option]) -> Iterator[str]:
    yield "| | |"
    yield "|---|---|"
    for option in options:
        names = ", ".join(option.flags)
        written = f"{names} {option.metavar}" if names and option.metavar else names or str(option.metavar)
        yield f"| `{written.replace('|', chr(92) + '|')}` | {option.help.replace('|', chr(92) + '|')} |"


if __name__ == "__main__":
    (Path(__file__).parents[1] / "docs" / "cli.md").write_text(render())
