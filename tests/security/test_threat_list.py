"""docs/security.md: every line of the threat list names a test that is there."""

from __future__ import annotations

import re
from pathlib import Path

TESTS = Path(__file__).parents[1]
DOCUMENT = TESTS.parent / "docs" / "security.md"


def test_every_threat_names_a_test_that_exists() -> None:
    section = DOCUMENT.read_text().partition("## Threats")[2].partition("\n## ")[0]
    rows = [line for line in section.splitlines() if line.startswith("| ")][1:]
    assert len(rows) > 40
    for row in rows:
        threat, answer, test = (cell.strip() for cell in row.strip("|").split(" | "))
        assert threat and answer
        match = re.fullmatch(r"`(test_\w+\.py)::(test_\w+)`", test)
        assert match is not None, f"{threat!r} names no test"
        files = list(TESTS.rglob(match[1]))
        assert any(f"def {match[2]}(" in file.read_text() for file in files), f"{test} is not there"
