"""The blocking client, made from the one for asyncio: `make generate`.

Only the calls are: what the drivers, connections and producers of the two do differently is written twice.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Final

import unasync

CLIENT: Final = Path(__file__).parents[1] / "src" / "millstream" / "client"
SOURCE: Final = CLIENT / "async_client.py"
TARGET: Final = CLIENT / "sync_client.py"

DOCSTRING: Final = '''"""The blocking client: streams, buckets and producers, for threads.

Generated from async_client.py by `make generate`; do not edit.
"""'''
REPLACEMENTS: Final = {
    "AsyncBucket": "Bucket",
    "AsyncClient": "Client",
    "AsyncFollowing": "Following",
    "AsyncIdempotentProducer": "IdempotentProducer",
    "AsyncPool": "Pool",
    "AsyncStream": "Stream",
    "AsyncValue": "Value",
    "AsyncValues": "Values",
    "async_connections": "connections",
    "async_driver": "sync_driver",
    "async_producer": "sync_producer",
}


def render() -> str:
    """The text of the blocking client."""
    with tempfile.TemporaryDirectory() as folder:
        source, target = Path(folder, "_async", TARGET.name), Path(folder, "_sync", TARGET.name)
        source.parent.mkdir()
        source.write_text(SOURCE.read_text())
        rule = unasync.Rule("/_async/", "/_sync/", REPLACEMENTS)
        unasync.unasync_files([str(source)], [rule])
        text = target.read_text()
    return _formatted(DOCSTRING + text[text.index('"""', 3) + 3 :])


def _formatted(text: str) -> str:
    """As `make check` wants it: what is awaited and iterated over takes more words than what is not."""
    for command in (["check", "--fix", "--unsafe-fixes", "--quiet", "-"], ["format", "-"]):
        ruff = [sys.executable, "-m", "ruff", *command, "--stdin-filename", str(TARGET)]
        text = subprocess.run(ruff, input=text, capture_output=True, text=True, check=True).stdout
    return text


if __name__ == "__main__":
    TARGET.write_text(render())
