"""The object store goes away under load and comes back: writes go on, then wait, then heal; nothing is lost."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import httpx
import pytest

from support.cold import SECONDS, S3Prefix, names, read_all, server_on, stats, verified, wait_until, wait_until_flushed
from support.s3 import S3Server

SETTINGS = ("cold.flush_interval=200ms", "hot.keep_bytes=0B", "hot.bytes_max=4MiB", "read.chunk_bytes_max=64KiB")
TEXT = {"content-type": "text/plain"}
MESSAGE_BYTES = 16_000


@pytest.fixture(scope="module")
def own_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[S3Server]:
    """A server of this module's own: others would not like theirs to stop."""
    with S3Server(tmp_path_factory.mktemp("s3")) as server:
        yield server


class Writer(threading.Thread):
    """Appends one message after another and repeats what was refused, as a producer does."""

    def __init__(self, url: str, path: str, stopping: threading.Event) -> None:
        super().__init__(daemon=True)
        self._url = url
        self.path = path
        self._stopping = stopping
        self.acknowledged = 0
        self.refusals: list[httpx.Response] = []
        self.problems: list[str] = []

    def message(self, number: int) -> bytes:
        return f"<{self.path} {number:06d}>".encode().ljust(MESSAGE_BYTES, b".")

    def run(self) -> None:
        try:
            self._write()
        except httpx.TransportError as error:  # the test fails by this, and has perhaps failed already
            self.problems.append(repr(error))

    def _write(self) -> None:
        with httpx.Client(base_url=self._url, timeout=SECONDS) as client:
            while not self._stopping.is_set():
                claim = {"producer-id": self.path, "producer-epoch": "0", "producer-seq": str(self.acknowledged)}
                body = self.message(self.acknowledged)
                answer = client.post(self.path, headers={**TEXT, **claim}, content=body)
                if answer.status_code == 200:
                    self.acknowledged += 1
                    time.sleep(0.004)
                elif answer.status_code == 503:
                    self.refusals.append(answer)
                    time.sleep(0.05)
                else:
                    self.problems.append(f"{answer.status_code} {answer.text}")
                    return


def test_an_outage_of_the_store_under_load_loses_nothing_and_heals_by_itself(
    tmp_path: Path, own_server: S3Server
) -> None:
    store = S3Prefix(own_server)
    stopping = threading.Event()
    with (
        server_on(tmp_path / "data", store, *SETTINGS) as server,
        httpx.Client(base_url=server.url, timeout=SECONDS) as client,
        ExitStack() as cleanup,
    ):
        writers = [Writer(server.url, f"/v1/stream/load/{number}", stopping) for number in range(3)]
        for writer in writers:
            assert client.put(writer.path, headers=TEXT).status_code == 201
            writer.start()
        cleanup.callback(stopping.set)
        wait_until(lambda: stats(client)["flush_count"] >= 2, "flushes under load")
        for writer in writers:  # on a busy machine writers may outrun the flushes even while the store is up
            writer.refusals.clear()

        own_server.stop()
        before = [writer.acknowledged for writer in writers]
        wait_until(lambda: any(writer.refusals for writer in writers), "memory is used up", 60)
        # Appends went on without a store until then, by about as much as memory holds.
        went_on = sum(writer.acknowledged for writer in writers) - sum(before)
        assert went_on > 0
        wait_until(lambda: stats(client)["flush_failure"] is not None, "the failure is noticed", 60)
        refusal = next(iter(writer.refusals[-1] for writer in writers if writer.refusals))
        assert refusal.status_code == 503
        assert int(refusal.headers["retry-after"]) > 0
        error = refusal.json()["error"]
        assert error["code"] == "backpressure"
        assert "memory" in error["message"]
        outage = stats(client)
        assert outage["flush_backlog_bytes"] > 1 << 20
        refused = client.post("/v1/stream/load/0", headers=TEXT, content=b"x" * 600_000)
        assert refused.status_code == 503
        # What is in memory is read as ever, and the server is healthy.
        started = time.monotonic()
        for writer in writers:
            tail = int(client.head(writer.path).headers["stream-next-offset"].partition("_")[2])
            last = tail // MESSAGE_BYTES - 1
            at = f"0000000000000000_{last * MESSAGE_BYTES:016d}"
            assert client.get(writer.path, params={"offset": at}).content == writer.message(last)
        assert client.get("/healthz").status_code == 200
        assert time.monotonic() - started < 5
        assert own_server.is_running is False

        own_server.start()
        refused_then = [len(writer.refusals) for writer in writers]
        acknowledged_then = [writer.acknowledged for writer in writers]
        wait_until(
            lambda: all(w.acknowledged > then + 20 for w, then in zip(writers, acknowledged_then, strict=True)),
            f"writes go on by themselves (they had been refused {refused_then} times)",
            90,
        )
        stopping.set()
        for writer in writers:
            writer.join(SECONDS)
            assert writer.problems == []
        wait_until_flushed(client, released=True, seconds=60)
        now = stats(client)
        assert (now["backpressure"], now["flush_failure"]) == (False, None)
        expected = {w.path: b"".join(map(w.message, range(w.acknowledged))) for w in writers}
        assert {path: read_all(client, path) for path in expected} == expected
        # The operator and the writers were told why.
        assert outage["backpressure"] is True
        assert "object store" in outage["backpressure_reason"]
        assert "object store" in refused.json()["error"]["message"]
        assert server.stop() == 0
    # And after a restart; and what failed flushes left behind in the store is gone.
    with (
        server_on(tmp_path / "data", store, *SETTINGS, "cold.leftover_age=0s") as server,
        httpx.Client(base_url=server.url, timeout=SECONDS) as client,
    ):
        assert {path: read_all(client, path) for path in expected} == expected
        client.put("/v1/stream/later", headers=TEXT, content=b"later")
        wait_until(lambda: not verified(tmp_path / "data", store)["problems"], "nothing is left over", 15)
        assert names(store, "segments")


@pytest.mark.soak
def test_a_server_starts_stops_and_keeps_everything_while_its_store_is_down(
    tmp_path: Path, own_server: S3Server
) -> None:
    store = S3Prefix(own_server)
    data_dir = tmp_path / "data"
    with server_on(data_dir, store, *SETTINGS) as server, httpx.Client(base_url=server.url, timeout=SECONDS) as client:
        client.put("/v1/stream/down/cold", headers=TEXT, content=b"cold")
        wait_until_flushed(client, released=True)
        own_server.stop()
        client.put("/v1/stream/down/hot", headers=TEXT, content=b"hot")
        unreadable = client.get("/v1/stream/down/cold", params={"offset": "-1"})
        assert (unreadable.status_code, unreadable.json()["error"]["code"]) == (503, "object_store_unavailable")
        assert int(unreadable.headers["retry-after"]) > 0
        assert server.stop(60) == 0
    with server_on(data_dir, store, *SETTINGS) as server, httpx.Client(base_url=server.url, timeout=SECONDS) as client:
        assert read_all(client, "/v1/stream/down/hot") == b"hot"
        assert client.post("/v1/stream/down/hot", headers=TEXT, content=b"ter").status_code == 204
        own_server.start()
        wait_until_flushed(client, released=True, seconds=60)
        assert read_all(client, "/v1/stream/down/hot") == b"hotter"
        assert read_all(client, "/v1/stream/down/cold") == b"cold"
        assert "Traceback" not in server.stderr()
