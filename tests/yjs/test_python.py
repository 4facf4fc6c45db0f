"""Documents from Python: the example as it stands, together with a real client in Node."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path

from support.yjs import DocumentClient, NodeClients, Typist

EXAMPLE = Path(__file__).parents[2] / "examples" / "yjs_document.py"


def test_the_example_and_a_client_in_node_edit_one_text(
    node: NodeClients, base_url: str, new_path: Callable[[], str]
) -> None:
    path = new_path()
    client = node.join(base_url, path)
    client.insert("from Node\n")
    client.ask("flush")
    command = [sys.executable, "-u", str(EXAMPLE), "--url", f"{base_url}/docs/{path}"]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    guard = threading.Timer(60, process.kill)
    guard.start()
    try:
        assert process.stdin is not None and process.stdout is not None
        assert process.stdout.readline() == "from Node\n"
        process.stdin.write("from Python\n")
        process.stdin.flush()
        client.wait_for_text("from Node\nfrom Python\n")
        client.insert("and again\n")
        assert any(line == "and again\n" for line in iter(process.stdout.readline, ""))
    finally:
        guard.cancel()
        process.kill()
        process.communicate()
    once = subprocess.run([*command, "--once"], capture_output=True, text=True, timeout=60)
    assert once.stdout == "from Node\nfrom Python\nand again\n\n"
    client.ask("close")


def test_the_example_loads_a_document_by_its_snapshot(document: DocumentClient) -> None:
    typist = Typist()
    for number in range(300):
        document.write(typist.type(f"line {number}\n"))
    document.wait_for_snapshot()
    document.write(typist.type("the last"))
    once = subprocess.run(
        [sys.executable, str(EXAMPLE), "--url", document.url, "--once"], capture_output=True, text=True, timeout=60
    )
    assert once.stdout == typist.text + "\n"
