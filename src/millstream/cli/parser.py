"""The command line's parser: argparse that shows help for a missing command and a suggestion for a wrong one."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from typing import Any, NoReturn

import msgspec

from millstream.cli import exit_codes
from millstream.cli.terminal import Style
from millstream.suggestions import did_you_mean


class Parser(argparse.ArgumentParser):
    _arguments: Sequence[str] = ()

    def add_actions(self, dest: str, metavar: str) -> Any:
        """Add subcommands. A command line that names none of them shows their list."""
        self.set_defaults(run=self._show_help)
        return self.add_subparsers(dest=dest, metavar=metavar, title="commands")

    def _show_help(self, options: argparse.Namespace) -> int:
        self.print_help()
        return exit_codes.OK

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """Refuse unknown arguments here, where the command that they were given to is known."""
        self._arguments = sys.argv[1:] if args is None else args
        found, left = super().parse_known_args(self._arguments, namespace)
        if left:
            known = [*self._option_string_actions]
            self.error(f"unrecognized arguments: {' '.join(left)}", did_you_mean(left[0].partition("=")[0], known))
        return found, left

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        if action.choices is None or value in action.choices:
            return
        choices = [str(choice) for choice in action.choices]
        meant = did_you_mean(str(value), choices)
        if isinstance(action, argparse._SubParsersAction):
            self.error(f"there is no command {f'{self.prog} {value}'!r}", meant)
        wanted = f"choose from {', '.join(choices)}"
        raise argparse.ArgumentError(action, f"invalid choice {value!r}; {f'{meant} {wanted}' if meant else wanted}")

    def error(self, message: str, hint: str | None = None) -> NoReturn:
        hint = f"{hint} " if hint else ""
        report_error(message, f"{hint}see {self.prog} --help", "usage", as_json="--json" in self._arguments)
        sys.exit(exit_codes.USAGE)


def report_error(message: str, hint: str | None, code: str, *, as_json: bool) -> None:
    """The format of every command's errors: on standard error, with a hint."""
    if as_json:
        described = {"code": code, "message": message, "hint": hint}
        sys.stderr.write(msgspec.json.encode({"error": described}).decode() + "\n")
        return
    style = Style(sys.stderr)
    print(f"millstream: {style.red(message)}", file=sys.stderr)
    if hint:
        print(f"  hint: {hint}", file=sys.stderr)
