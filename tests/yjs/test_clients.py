"""Real Yjs documents in Node, synced by the published provider, converge whatever happens to them and to the server."""

from __future__ import annotations

import json
import re
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from millstream.protocol.lib0 import frame_update
from millstream.yjs.merging import merge
from support.server import PYTHON, ServerProcess
from support.yjs import DocumentClient, NodeClient, NodeClients, Typist, wait_for

FOLDER = Path(__file__).parent


@pytest.fixture
def own_server(tmp_path: Path) -> Iterator[ServerProcess]:
    """A server that the test may stop and start."""
    with ServerProcess(tmp_path / "data", settings=("yjs.compaction_threshold=4KiB",)) as running:
        yield running


def service(server: ServerProcess) -> str:
    return f"{server.url}/v1/yjs/notes"


def converge(*clients: NodeClient) -> str:
    """Wait until all show the same text, and return it."""
    texts = wait_for(lambda: {client.text for client in clients}, lambda texts: len(texts) == 1)
    return str(texts.pop())


def leave(*clients: NodeClient) -> None:
    for client in clients:
        client.ask("close")


@pytest.mark.parametrize("live_mode", ["sse", "long-poll"])
def test_concurrent_edits_converge(
    node: NodeClients, base_url: str, new_path: Callable[[], str], live_mode: str
) -> None:
    path = new_path()
    clients = [node.join(base_url, path, liveMode=live_mode) for _ in range(3)]
    for number in range(40):
        for name, client in zip("abc", clients, strict=True):
            client.insert(f"{name}{number} ", 0 if number % 3 else None)
    length = 3 * sum(len(f"a{number} ") for number in range(40))
    for client in clients:
        client.wait_for_length(length)
    text = converge(*clients)
    assert sorted(text.split()) == sorted(f"{name}{number}" for name in "abc" for number in range(40))
    clients[0].ask("remove", index=0, length=5)
    clients[1].ask("remove", index=2, length=5)
    for client in clients:
        client.wait_for_length(length - 7)
    assert converge(*clients) == text[7:]
    late = node.join(base_url, path)
    late.wait_for_text(text[7:])
    assert [client.ask("errors") for client in clients] == [[], [], []]
    leave(late, *clients)


def test_offline_edits_arrive_after_reconnecting(node: NodeClients, base_url: str, new_path: Callable[[], str]) -> None:
    path = new_path()
    offline, online = node.join(base_url, path), node.join(base_url, path)
    offline.insert("shared ")
    online.wait_for_text("shared ")
    offline.ask("disconnect")
    offline.insert("offline ")
    online.insert("online ", 0)
    assert (offline.text, online.text) == ("shared offline ", "online shared ")
    offline.ask("reconnect")
    for client in (offline, online):
        client.wait_for_text("online shared offline ")
    offline.insert("again ")
    online.wait_for_text("online shared offline again ")
    node.join(base_url, path).wait_for_text("online shared offline again ")
    leave(offline, online)


def test_awareness_shows_who_is_there_and_who_has_left(
    node: NodeClients, base_url: str, new_path: Callable[[], str]
) -> None:
    path = new_path()
    ada, grace = node.join(base_url, path), node.join(base_url, path)
    ada.ask("presence", state={"name": "Ada", "cursor": 3})
    grace.ask("waitPresent", names=[{"name": "Ada", "cursor": 3}], milliseconds=5000)
    grace.ask("presence", state="Grace")
    ada.ask("presence", state="Ada")
    for client in (ada, grace):
        client.wait_for_present("Ada", "Grace")
    ada.ask("disconnect")
    grace.wait_for_present("Grace")
    leave(ada, grace)


def test_joining_during_compaction_shows_the_whole_text(
    node: NodeClients, base_url: str, new_path: Callable[[], str]
) -> None:
    path = new_path()
    writer = node.join(base_url, path)
    document = DocumentClient(base_url, path)
    expected, snapshots = "", set()
    for number in range(15):  # each round is enough for a compaction; those who join come at all stages of it
        words = f"round {number} ".ljust(2000, ".")
        for start in range(0, len(words), 10):
            writer.insert(words[start : start + 10])
        expected += words
        writer.ask("flush")
        joined = node.join(base_url, path)
        joined.wait_for_text(expected)
        leave(joined)
        snapshots.add(document.discover())
    assert len(snapshots) > 3
    assert document.load() == document.load_from_beginning() == expected
    document.http.close()
    leave(writer)


@pytest.mark.parametrize("how", ["stop", "kill"])
def test_a_session_survives_the_restart_of_the_server(node: NodeClients, own_server: ServerProcess, how: str) -> None:
    url = service(own_server)
    first, second = node.join(url, "plan"), node.join(url, "plan")
    for number in range(300):
        first.insert(f"word {number} ")
    first.ask("flush")
    before = first.text
    second.wait_for_text(before)
    document = DocumentClient(url, "plan")
    snapshot = document.wait_for_snapshot()
    if how == "stop":
        own_server.stop()
    else:
        own_server.kill()
    own_server.start()
    assert document.discover() >= snapshot
    assert document.load() == before
    second.insert("after ")  # the server is back before anything is typed: the provider needs no help
    for client in (first, second):
        client.wait_for_text(before + "after ")
    document.http.close()
    leave(first, second)


def test_what_is_typed_while_the_server_is_down_arrives_when_it_is_back(
    node: NodeClients, own_server: ServerProcess
) -> None:
    url = service(own_server)
    first, second = node.join(url, "plan"), node.join(url, "plan")
    first.insert("before ")
    second.wait_for_text("before ")
    own_server.kill()
    first.insert("during ")
    own_server.start()
    first.ask("reconnect")
    second.wait_for_text("before during ")
    second.insert("after")
    first.wait_for_text("before during after")
    leave(first, second)


def test_malformed_updates_are_logged_and_stop_nothing(node: NodeClients, own_server: ServerProcess) -> None:
    document = DocumentClient(service(own_server), "plan")
    typist = Typist()
    document.write(*[typist.type("a") for _ in range(30)])
    bad_at = document.http.head(document.url).headers["stream-next-offset"]
    bad = frame_update(b"\xff" * 30)
    assert document.post(bad).status_code == 204
    for _ in range(150):
        document.write(typist.type("many words "))
    first = document.wait_for_snapshot()
    wait_for(own_server.stderr, lambda log: "malformed" in log)
    line = next(line for line in own_server.stderr().splitlines() if "malformed" in line)
    assert "notes/docs/plan" in line and bad_at in line
    # Nothing is lost: the bytes are where they were, new clients see everything else, compaction goes on.
    assert bad in document.get(offset="-1").content
    client = node.join(service(own_server), "plan")
    client.wait_for_text(typist.text)
    for _ in range(150):
        document.write(typist.type("more words "))
    document.wait_for_snapshot(other_than=first)
    client.wait_for_text(typist.text)
    assert document.load() == typist.text
    document.http.close()
    leave(client)


def test_a_crash_in_the_middle_of_a_compaction_leaves_the_old_snapshot(
    own_server: ServerProcess, node: NodeClients
) -> None:
    document = DocumentClient(service(own_server), "plan")
    typist = Typist()
    for _ in range(200):
        document.write(typist.type("many words "))
    document.wait_for_snapshot()
    for _ in range(5):
        before = document.discover()
        stop = threading.Timer(0.02, own_server.kill)
        document.write(*[typist.type("so many words ") for _ in range(300)])
        stop.start()
        stop.join()
        own_server.start()
        assert document.discover() >= before
        assert document.get(offset=document.discover()).status_code == 200
        assert document.load() == document.load_from_beginning() == typist.text
    node.join(service(own_server), "plan").wait_for_text(typist.text)
    document.http.close()


def test_a_document_with_its_snapshot_is_restored_from_the_object_store(
    own_server: ServerProcess, tmp_path: Path
) -> None:
    document = DocumentClient(service(own_server), "plan")
    typist = Typist()
    for _ in range(200):
        document.write(typist.type("many words "))
    snapshot = document.wait_for_snapshot()
    own_server.stop()
    document.http.close()
    fresh = tmp_path / "fresh"
    cold = f"cold.path={own_server.data_dir / 'cold'}"
    command = [PYTHON, "-m", "millstream.cli.main", "restore", "--data-dir", str(fresh), "--set", cold]
    subprocess.run(command, check=True, capture_output=True)
    with ServerProcess(fresh, settings=(cold,)) as restored:
        again = DocumentClient(service(restored), "plan")
        assert again.discover() >= snapshot
        assert again.load() == again.load_from_beginning() == typist.text
        again.http.close()


def test_history_stays_readable_unless_retention_trims_it(tmp_path: Path, node: NodeClients) -> None:
    settings = ("yjs.compaction_threshold=4KiB", "yjs.retention=0s")
    with ServerProcess(tmp_path / "data", settings=settings) as server:
        document = DocumentClient(service(server), "plan")
        typist = Typist()
        for _ in range(200):
            document.write(typist.type("many words "))
        document.wait_for_snapshot()
        answer = wait_for(lambda: document.get(offset="-1"), lambda answer: answer.status_code == 410)
        assert answer.json()["error"]["code"] == "OFFSET_EXPIRED"
        earliest = answer.headers["stream-earliest-offset"]
        assert document.get(offset=earliest).status_code == 200
        node.join(service(server), "plan").wait_for_text(typist.text)
        document.http.close()


def test_snapshots_lose_nothing_of_updates_that_arrive_out_of_order() -> None:
    made = subprocess.run(
        ["node", "out_of_order.js", "make", "11", "60"], cwd=FOLDER, capture_output=True, text=True, check=True
    )
    reads = []
    for case in json.loads(made.stdout):
        updates = [bytes.fromhex(update) for update in case["updates"]]
        snapshot, start = b"", 0
        for end in (15, 30, 45, len(updates)):
            merged = merge(snapshot, [frame_update(update) for update in updates[start:end]])
            assert merged.skipped == []
            snapshot, start = merged.snapshot, end
            reads.append({"snapshot": snapshot.hex(), "rest": case["updates"][end:], "text": case["text"]})
    judged = subprocess.run(
        ["node", "out_of_order.js", "judge"],
        cwd=FOLDER,
        input=json.dumps(reads),
        capture_output=True,
        text=True,
        check=True,
    )
    assert int(judged.stdout) == len(reads) == 240


def test_requests_do_not_wait_for_a_compaction(tmp_path: Path) -> None:
    """What a request takes while a document is compacted is a small part of what the compaction takes."""
    typist = Typist()
    updates = [typist.type("word ") for _ in range(6_000)]
    body = b"".join(map(frame_update, updates))
    with ServerProcess(tmp_path / "data", settings=(f"yjs.compaction_threshold={len(body)}",)) as server:
        document = DocumentClient(service(server), "plan")
        begun = time.monotonic()
        assert document.post(body).status_code == 204
        waits: list[float] = []
        while document.discover() == "-1":
            waits.append(document.get(offset="now").elapsed.total_seconds())
        took = time.monotonic() - begun
        assert len(waits) > 3
        assert sorted(waits)[len(waits) // 2] < took / 5
        assert document.load() == typist.text
        document.http.close()


def test_the_readme_snippet_opens_a_document(yjs_server: ServerProcess, tmp_path: Path) -> None:
    readme = (FOLDER.parents[1] / "README.md").read_text().replace("http://127.0.0.1:4437", yjs_server.url)
    snippet = next(block for block in re.findall(r"```js\n(.*?)```", readme, re.DOTALL) if "YjsProvider" in block)
    script = FOLDER / f".readme-{tmp_path.name}.mjs"  # where the provider is installed
    script.write_text(
        snippet
        + """
provider.once("synced", async () => {
  doc.getText("text").insert(0, "hello")
  await provider.flush()
  process.exit(0)
})
"""
    )
    try:
        subprocess.run(["node", str(script)], check=True, timeout=60)
    finally:
        script.unlink()
    document = DocumentClient(f"{yjs_server.url}/v1/yjs/notes", "plan")
    assert document.load() == "hello"
    document.http.close()
