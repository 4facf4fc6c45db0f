"""docs/configuration.md says what the settings say."""

from __future__ import annotations

from pathlib import Path

from scripts.configuration_docs import render

DOCUMENT = Path(__file__).parents[3] / "docs" / "configuration.md"


def test_configuration_reference_is_up_to_date() -> None:
    assert DOCUMENT.read_text() == render(), "run make generate"
