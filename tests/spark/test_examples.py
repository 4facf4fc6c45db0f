"""The examples, run against a server."""

from __future__ import annotations

import importlib.util
from collections import Counter
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING

from support.server import ServerProcess
from support.spark_source import Streams

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

EXAMPLES = Path(__file__).parents[2] / "examples"


def load(name: str) -> ModuleType:
    specification = importlib.util.spec_from_file_location(name, EXAMPLES / f"{name}.py")
    assert specification is not None and specification.loader is not None
    module = importlib.util.module_from_spec(specification)
    specification.loader.exec_module(module)
    return module


def test_agent_runs_become_a_table_and_a_chart_and_live_totals(
    spark: SparkSession, own_server: ServerProcess, tmp_path: Path
) -> None:
    runs = load("agent_runs").main(own_server.url, tmp_path)
    rows = {row.stream: row for row in runs.collect()}
    assert len(rows) == 40
    assert all(row.state == "done" for row in rows.values())
    assert rows["run-008"].steps == 6
    assert spark.read.parquet(str(tmp_path / "runs")).count() == 40
    assert (tmp_path / "tokens-by-agent.png").read_bytes().startswith(b"\x89PNG")

    tokens: Counter[str] = Counter()
    for row in rows.values():
        tokens[row.agent] += row.tokens
    live = load("live_totals")
    for _ in range(2):  # the second finds nothing new, and says nothing twice
        assert live.start(own_server.url, tmp_path / "checkpoint", once=True).awaitTermination(120)
        with Streams(own_server, "agent-totals") as totals:
            for agent, expected in tokens.items():
                steps = sum(row.steps for row in rows.values() if row.agent == agent)
                assert totals.messages(agent) == [{"agent": agent, "steps": steps, "tokens": expected}]
