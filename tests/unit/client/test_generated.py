"""The blocking client is the one for asyncio without the waiting."""

from __future__ import annotations

import pytest

pytest.importorskip("unasync", reason="a development dependency: make installs it")

from scripts.generate_client import TARGET, render


def test_blocking_client_is_generated_from_the_asynchronous_one() -> None:
    assert TARGET.read_text() == render(), "run make generate"
