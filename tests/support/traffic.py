"""Mixed traffic against one server: writers that keep account, readers that follow, vanish, dawdle and misbehave.

Everything here is a thread with a socket of its own, told to stop by one event, and reports what it found wrong.
"""

from __future__ import annotations

import contextlib
import os
import random
import threading
import time
from collections.abc import Callable

import httpx

from millstream.client import Client, ClientError, ConnectionFailed
from support.raw_http import RawConnection

TEXT = ("Content-Type", "text/plain")
STREAMS = 8


def name_of(number: int) -> str:
    return f"soak/{number % STREAMS}"


def path_of(number: int) -> str:
    return f"/v1/stream/{name_of(number)}"


class Traffic:
    """`with Traffic(url, seed, acknowledged):` runs the mix, and adds what is acknowledged to what was before."""

    def __init__(self, url: str, seed: int, acknowledged: dict[int, list[bytes]]) -> None:
        self.url = url
        self.acknowledged = acknowledged
        self.problems: list[str] = []
        self.counts: dict[str, int] = {}
        self._random = random.Random(seed)
        self._stopping = threading.Event()
        kinds: list[Callable[[int], None]] = [
            *[self._write] * STREAMS,
            *[self._follow] * 6,
            *[self._poll] * 4,
            *[self._catch_up] * 2,
            *[self._vanish] * 4,
            *[self._dawdle] * 3,
            self._misbehave,
            self._come_and_go,
        ]
        self._threads = [
            threading.Thread(target=self._guard, args=(kind, number), daemon=True) for number, kind in enumerate(kinds)
        ]

    def __enter__(self) -> Traffic:
        with Client(self.url) as client:
            for number in range(STREAMS):
                client.stream(name_of(number)).create(content_type=TEXT[1])
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self._stopping.set()
        for thread in self._threads:
            thread.join(60)
            assert not thread.is_alive(), "a client never came to its end"

    def _guard(self, kind: Callable[[int], None], number: int) -> None:
        name = kind.__name__
        while not self._stopping.is_set():
            try:
                kind(number)
                self.counts[name] = self.counts.get(name, 0) + 1
            except (OSError, AssertionError, ClientError, httpx.TransportError) as error:
                is_expected = isinstance(error, OSError | ConnectionFailed | httpx.TransportError)
                if not self._stopping.is_set() and not is_expected:
                    self.problems.append(f"{name}: {error!r}")
                time.sleep(0.05)

    # -- the kinds -------------------------------------------------------------------------------------------

    def _write(self, number: int) -> None:
        """Appends in order; each number is its stream's only writer."""
        account = self.acknowledged[number]
        with Client(self.url, timeout=20) as client:
            stream = client.stream(name_of(number))
            for _ in range(50):
                if self._stopping.is_set():
                    return
                message = b"%d:%d;" % (number, len(account)) + b"x" * self._random.randrange(0, 2000) + b"\n"
                stream.append(message)
                account.append(message)
                time.sleep(0.002)

    def _follow(self, number: int) -> None:
        """An SSE reader for a while, which leaves without a word."""
        with RawConnection(self.url, seconds=20) as connection:
            connection.send(connection.request("GET", f"{path_of(number)}?offset=now&live=sse"))
            assert connection.head()[0] == 200
            for _ in range(self._random.randrange(1, 60)):
                if self._stopping.is_set() or connection.chunk() is None:
                    return

    def _poll(self, number: int) -> None:
        with httpx.Client(base_url=self.url, timeout=20) as client:
            offset = "now"
            for _ in range(20):
                if self._stopping.is_set():
                    return
                answer = client.get(path_of(number), params={"offset": offset, "live": "long-poll"})
                assert answer.status_code in (200, 204), answer.status_code
                offset = answer.headers["stream-next-offset"]

    def _catch_up(self, number: int) -> None:
        """All of a stream from its start, hot and cold; each message follows the one before it."""
        with Client(self.url, timeout=20) as client:
            content = b""
            for chunk in client.stream(name_of(number)).read():
                content += chunk.data
                if self._stopping.is_set():
                    break
            seen = [line.partition(b";")[0] for line in content.split(b"\n")[:-1]]
            assert seen == [b"%d:%d" % (number % STREAMS, index) for index in range(len(seen))], "out of order"
            time.sleep(0.5)

    def _vanish(self, number: int) -> None:
        """Goes away in the middle: of headers, of a body, of a long-poll, of an answer."""
        with RawConnection(self.url) as connection:
            request = connection.request("POST", path_of(number) + "-nobody", [TEXT], os.urandom(5000))
            which = self._random.randrange(4)
            if which == 0:
                connection.send(request[: self._random.randrange(1, 60)])
            elif which == 1:
                connection.send(request[:-100])
            elif which == 2:
                connection.send(connection.request("GET", f"{path_of(number)}?offset=now&live=long-poll"))
            else:
                connection.send(connection.request("GET", f"{path_of(number)}?offset=-1"))
            time.sleep(self._random.random() * 0.1)

    def _dawdle(self, number: int) -> None:
        """Asks for events and never reads them."""
        with RawConnection(self.url, receive_buffer_bytes=4096) as connection:
            connection.send(connection.request("GET", f"{path_of(number)}?offset=-1&live=sse"))
            self._stopping.wait(3 + self._random.random() * 3)

    def _misbehave(self, number: int) -> None:
        """Sends what is no request, or none that is allowed."""
        for raw in (b"\x16\x03\x01\x02\x00\x01", b"GET / HTTP/9.9\r\n\r\n", b"X" * 40_000, b"POST / HTTP/1.1\r\n\r\n"):
            with RawConnection(self.url) as connection, contextlib.suppress(OSError):
                connection.send(raw)
                connection.finish_sending()
                connection.rest()
        time.sleep(0.05)

    def _come_and_go(self, number: int) -> None:
        """Streams that are created, written, read and deleted."""
        with Client(self.url, timeout=20) as client:
            stream = client.stream(f"soak/passing-{self._random.randrange(1 << 30)}")
            assert stream.create(content_type=TEXT[1], body=b"short").is_new
            assert stream.read_all() == b"short"
            stream.delete()
        time.sleep(0.02)
