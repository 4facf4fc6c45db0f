"""`millstream doctor`: check this machine and its configuration before, or while, a server runs on it."""

from __future__ import annotations

import argparse
import os
import sys
from typing import Any, Final

from millstream.cli.checks import run_checks
from millstream.cli.findings import Finding, counted
from millstream.cli.options import add_configuration, add_json, add_server, load_configuration, print_json
from millstream.cli.terminal import Style
from millstream.clock import SystemClock
from millstream.config import unknown_variables
from millstream.errors import ConfigurationError

_MARKS: Final = {"ok": "✓", "warning": "!", "problem": "✗"}


def add_parser(commands: Any) -> None:
    parser: argparse.ArgumentParser = commands.add_parser(
        "doctor",
        help="check configuration, disk, object store, clock, limits, access and port",
        description="Check the configuration, the data directory and its disk, the object store (by writing, reading"
        " and deleting an object), the clock, the limits on open files and memory, who can reach the server, its"
        " certificate, its tokens, the port, and of a node of a cluster its settings, its broker's port and the other"
        " brokers, and say what to fix. Exit code 1 if there is a problem; warnings alone"
        " leave it 0.",
        epilog="example: millstream doctor --config millstream.toml",
    )
    add_server(parser)
    add_configuration(parser)
    add_json(parser)
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    show = _quiet if options.json else _show
    findings: list[Finding] = []
    try:
        config = load_configuration(options)
    except ConfigurationError as error:
        findings.append(Finding("configuration", "problem", error.message, error.hint or "see docs/configuration.md"))
        show(findings[-1])
    else:
        origin = str(options.config) if options.config is not None else "defaults, environment and flags"
        findings.append(Finding("configuration", "ok", f"{origin}: every setting is valid"))
        show(findings[-1])
        for sentence in unknown_variables(os.environ):
            findings.append(Finding("configuration", "warning", sentence, "unset it, or correct its name"))
            show(findings[-1])
        for finding in run_checks(config, SystemClock()):
            findings.append(finding)
            show(finding)
    problems = sum(finding.level == "problem" for finding in findings)
    warnings = sum(finding.level == "warning" for finding in findings)
    if options.json:
        print_json({"is_well": problems == 0, "findings": [finding._asdict() for finding in findings]})
    else:
        print(_summary(problems, warnings))
    return 1 if problems else 0


def _quiet(_: Finding) -> None:
    pass


def _show(finding: Finding) -> None:
    style = Style(sys.stdout)
    colour = {"ok": style.green, "warning": style.yellow, "problem": style.red}[finding.level]
    print(f"{colour(_MARKS[finding.level])} {finding.check + ':':<16}{finding.message}", flush=True)
    if finding.hint is not None and finding.level != "ok":
        print(f"  {'':<16}{style.bold('fix:')} {finding.hint}", flush=True)


def _summary(problems: int, warnings: int) -> str:
    if not problems and not warnings:
        return "all is well"
    numbers = ((problems, "problem"), (warnings, "warning"))
    return " and ".join(counted(count, word) for count, word in numbers if count)
