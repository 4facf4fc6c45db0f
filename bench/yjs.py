"""A Yjs document of 100,000 edits: what its compaction costs, and how long a new client then takes to load it.

    python -m bench.yjs [--edits 100000] [--authors 4]

Some people type into it at once, every edit a request of its own; then the document is compacted once. The cost is the
processor time of the server and of its merging process together, from the last edit to the snapshot, less what the
idle server uses in the same time. The client is the published provider in Node (`tests/yjs`, after `make test` or `npm
install` there), from its creation to its `synced`; the first load of a Node process is told apart from later ones.
Requests for another stream run beside the compaction and tell how long they waited.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from random import Random
from urllib.request import urlopen

from pycrdt import Doc, Text

from millstream.protocol.lib0 import frame_update

CLIENTS = Path(__file__).parents[1] / "tests" / "yjs" / "clients.js"
PIPELINED = 32
LOADS = 7


def main() -> None:
    parser = argparse.ArgumentParser(description="Measure a large Yjs document.")
    parser.add_argument("--edits", type=int, default=100_000)
    parser.add_argument("--authors", type=int, default=4, help="how many type at once, each into a copy (4)")
    options = parser.parse_args()
    authors = [edits(options.edits // options.authors, number) for number in range(options.authors)]
    bodies = [[frame_update(update) for update in updates] for updates in authors]
    text = together(authors)
    size = sum(len(body) for author in bodies for body in author)
    print(f"{sum(map(len, authors)):,} edits, {size:,} bytes of updates, {len(text):,} characters", flush=True)
    with tempfile.TemporaryDirectory(prefix="millstream-bench-yjs-") as folder:
        # The last edit is the one that asks for the compaction.
        server, port = start(Path(folder), size)
        try:
            measure(server, port, bodies, text)
        finally:
            server.terminate()
            server.wait()


def edits(count: int, seed: int) -> list[bytes]:
    """Somebody who types, goes elsewhere now and then, and deletes one letter in ten."""
    random = Random(seed)
    doc = Doc({"text": Text()})
    updates: list[bytes] = []
    subscription = doc.observe(lambda event: updates.append(event.update))
    text, length, place = doc["text"], 0, 0
    for _ in range(count):
        if random.random() < 0.05:
            place = random.randint(0, length)
        if place and random.random() < 0.1:
            place, length = place - 1, length - 1
            del text[place : place + 1]
        else:
            text.insert(place, random.choice("etaoin shrdlu"))
            place, length = place + 1, length + 1
    doc.unobserve(subscription)
    return updates


def together(authors: list[list[bytes]]) -> str:
    doc = Doc({"text": Text()})
    for updates in authors:
        for update in updates:
            doc.apply_update(update)
    return str(doc["text"])


def start(folder: Path, threshold: int) -> tuple[subprocess.Popen[str], int]:
    command = [sys.executable, "-m", "millstream.cli.main", "serve", "--listen", "127.0.0.1:0"]
    command += ["--data-dir", str(folder / "data"), "--set", f"yjs.compaction_threshold={threshold}"]
    server = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    assert server.stdout is not None
    match = re.search(r"http://127.0.0.1:(\d+)", server.stdout.readline())
    assert match is not None, "the server did not start"
    return server, int(match[1])


def measure(server: subprocess.Popen[str], port: int, bodies: list[list[bytes]], text: str) -> None:
    url = f"http://127.0.0.1:{port}"
    begun = time.perf_counter()
    last = bodies[0].pop()
    with ThreadPoolExecutor(len(bodies)) as threads:
        list(threads.map(lambda body: post(port, body), bodies))
    print(f"written in {time.perf_counter() - begun:.1f} s, one request an edit", flush=True)
    before = load(url, None, 1)
    print(f"a client loads it without a snapshot in {before[0]:.0f} ms", flush=True)
    idle = processor_seconds(server.pid)
    time.sleep(2)
    idle_share = (processor_seconds(server.pid) - idle) / 2
    used, begun = processor_seconds(server.pid), time.perf_counter()
    post(port, [last])
    waits = wait_for_snapshot(url)
    took = time.perf_counter() - begun
    cost = processor_seconds(server.pid) - used - idle_share * took
    print(f"compaction: {cost:.2f} s of processor time, {took:.2f} s by the clock")
    print(
        f"requests beside it: {len(waits)}, median {statistics.median(waits) * 1000:.1f} ms, "
        f"slowest {max(waits) * 1000:.1f} ms"
    )
    loads = load(url, text, LOADS)
    print(f"a new client loads it by its snapshot in {loads[0]:.0f} ms, then {statistics.median(loads[1:]):.0f} ms")


def post(port: int, bodies: list[bytes]) -> None:
    head = b"POST /v1/yjs/bench/docs/large HTTP/1.1\r\nhost: bench\r\ncontent-type: application/octet-stream\r\n"
    with socket.create_connection(("127.0.0.1", port)) as connection:
        answers = connection.makefile("rb")
        for first in range(0, len(bodies), PIPELINED):
            some = bodies[first : first + PIPELINED]
            connection.sendall(b"".join(b"%bcontent-length: %d\r\n\r\n%b" % (head, len(one), one) for one in some))
            for _ in some:
                status = answers.readline()
                assert status.startswith(b"HTTP/1.1 204"), status
                while answers.readline() != b"\r\n":
                    pass


def wait_for_snapshot(url: str) -> list[float]:
    """Ask until there is one; returns how long each answer took."""
    waits = []
    while True:
        begun = time.perf_counter()
        with urlopen(f"{url}/v1/yjs/bench/docs/large?offset=snapshot&max_bytes=1") as answer:
            waits.append(time.perf_counter() - begun)
            if "_snapshot" in answer.url:
                return waits
        time.sleep(0.002)


def processor_seconds(pid: int) -> float:
    """What a process has used, and its children that have ended."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return sum(map(int, fields[11:15])) / os.sysconf("SC_CLK_TCK")


def load(url: str, text: str | None, times: int) -> list[float]:
    """Milliseconds until the provider says that it is in sync; the text must be the one given."""
    node = subprocess.Popen(["node", str(CLIENTS)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert node.stdin is not None and node.stdout is not None
    milliseconds = []
    for number in range(times):
        answers = []
        for command in ("load", "text", "close"):
            asked = {"command": command, "id": number, "baseUrl": f"{url}/v1/yjs/bench", "docId": "large"}
            node.stdin.write(json.dumps(asked) + "\n")
            node.stdin.flush()
            answers.append(json.loads(node.stdout.readline()))
        assert text in (None, answers[1]["value"]), "the client shows another text"
        milliseconds.append(answers[0]["value"]["milliseconds"])
    node.stdin.close()
    node.wait()
    return milliseconds


if __name__ == "__main__":
    main()
