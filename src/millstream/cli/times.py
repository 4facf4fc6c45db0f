"""Times in a readable format."""

from __future__ import annotations

from datetime import UTC, datetime


def utc(milliseconds: int) -> str:
    return datetime.fromtimestamp(milliseconds / 1000, UTC).strftime("%Y-%m-%d %H:%M:%SZ")
