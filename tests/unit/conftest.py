"""Every unit test has a deadline of its own: far more than it needs, even on a busy machine."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

settings.register_profile("millstream", max_examples=100, deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("millstream")

_HERE = Path(__file__).parent


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.path.is_relative_to(_HERE) and item.get_closest_marker("timeout") is None:
            item.add_marker(pytest.mark.timeout(180))
