"""What the documents say that can be compared with the code: limits, links, files, numbers."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from millstream.config import describe

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
LIMITS = ("_max", "_min", "_timeout", "_per_second")


def documents() -> Iterator[Path]:
    yield from ROOT.glob("*.md")
    yield from DOCS.rglob("*.md")


def test_every_setting_that_is_a_limit_has_its_line_with_its_default() -> None:
    _, _, section = (DOCS / "behaviour.md").read_text().partition("\n## Limits\n")
    written = dict(re.findall(r"`(\w+\.\w+)` \((\w+)\)", section))
    assert written == {key: default for key, default, _, _ in describe() if key.endswith(LIMITS)}


def test_every_link_to_a_file_leads_to_one() -> None:
    broken = [
        f"{document.relative_to(ROOT)}: {target}"
        for document in documents()
        for target in re.findall(r"\]\(([^)#\s]+)(?:#[^)]*)?\)", document.read_text())
        if "://" not in target and not (document.parent / target).exists()
    ]
    assert broken == []


def test_every_file_that_the_architecture_names_exists() -> None:
    named = re.findall(r"`((?:[a-z_0-9]+/)+[a-z_0-9]+\.py)", (DOCS / "ARCHITECTURE.md").read_text())
    package = ROOT / "src" / "millstream"
    assert [path for path in named if not (package / path).exists() and not (ROOT / path).exists()] == []
    assert len(named) > 40


def test_decisions_have_numbers_of_their_own_which_their_titles_repeat() -> None:
    decisions = sorted((DOCS / "adr").glob("*.md"))
    numbers = [int(path.name[:4]) for path in decisions]
    assert [number for number, count in Counter(numbers).items() if count > 1] == []
    for path, number in zip(decisions, numbers, strict=True):
        assert path.read_text().startswith(f"# {number}. "), path.name


def test_references_to_decisions_name_their_numbers() -> None:
    for document in documents():
        for number, file in re.findall(r"\[ADR (\d+)\]\((?:[./a-z]*/)?(\d{4})-", document.read_text()):
            assert int(number) == int(file), f"{document.name}: ADR {number}"
