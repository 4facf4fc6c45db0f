"""Logs: one line per event on standard error, for people on a terminal and as JSON elsewhere.

Lines carry the message and, if there is one, the request's id. Headers and bodies are never passed to a logger, so
neither payloads nor tokens can appear in logs.
"""

from __future__ import annotations

import logging
import sys
from datetime import UTC, datetime
from typing import Final, TextIO

import msgspec

from millstream.config import LoggingSection

_COLOURS: Final = {"DEBUG": "\033[2m", "WARNING": "\033[33m", "ERROR": "\033[31m", "CRITICAL": "\033[31;1m"}
_PLAIN: Final = "\033[0m"
_EXTRAS: Final = ("request_id", "method", "path", "status", "milliseconds", "bytes", "principal", "address")


def configure_logging(section: LoggingSection, stream: TextIO | None = None) -> None:
    """Replace the handlers of the root logger by one as configured; may be called again."""
    stream = stream or sys.stderr
    is_human = section.format == "human" or (section.format == "auto" and stream.isatty())
    handler = logging.StreamHandler(stream)
    handler.setFormatter(HumanFormatter(stream.isatty()) if is_human else JsonFormatter())
    root = logging.getLogger()
    for former in root.handlers[:]:
        root.removeHandler(former)
    root.addHandler(handler)
    root.setLevel(section.level.upper())


class JsonFormatter(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        line: dict[str, object] = {
            "time": _time(record),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        line.update({name: record.__dict__[name] for name in _EXTRAS if name in record.__dict__})
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return msgspec.json.encode(line).decode()


class HumanFormatter(logging.Formatter):
    def __init__(self, is_coloured: bool) -> None:
        super().__init__()
        self._is_coloured = is_coloured

    def format(self, record: logging.LogRecord) -> str:
        text = f"{_time(record)} {record.levelname:<8} {record.name}: {record.getMessage()}"
        extras = " ".join(f"{name}={record.__dict__[name]}" for name in _EXTRAS if name in record.__dict__)
        if extras:
            text += f"  [{extras}]"
        if record.exc_info:
            text += "\n" + self.formatException(record.exc_info)
        colour = _COLOURS.get(record.levelname, "") if self._is_coloured else ""
        return f"{colour}{text}{_PLAIN}" if colour else text


def _time(record: logging.LogRecord) -> str:
    at = datetime.fromtimestamp(record.created, UTC)
    return at.isoformat(timespec="milliseconds").replace("+00:00", "Z")
