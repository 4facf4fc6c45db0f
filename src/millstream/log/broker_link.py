"""The connection to a NATS broker, on its own thread and event loop.

It can be used from any thread: coroutines run on the link's loop, and callers block on or await their results. So a
busy server does not delay the link's pings and lease renewals, and a log can be read without a running loop. Knows
requests, replies and JetStream's API; must not know what is stored there.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import ssl
import threading
from collections.abc import Awaitable, Callable, Coroutine
from concurrent.futures import CancelledError, Future
from typing import Any, Final, NamedTuple, TypeVar

import msgspec
import nats
import nats.errors
import uvloop
from nats.aio.client import Client
from nats.aio.msg import Msg

from millstream.errors import MillstreamError, Unavailable
from millstream.tasks import Supervisor, end

logger = logging.getLogger("millstream.broker")

T = TypeVar("T")

REQUEST_SECONDS: Final = 5.0
CONNECT_SECONDS: Final = 5.0
CLOSE_SECONDS: Final = 2.0
WAITING_SECONDS: Final = 5.0
RECONNECT_SECONDS: Final = 0.25
ASK_AGAIN_SECONDS: Final = 0.2
NO_RESPONDERS: Final = "503"
PENDING_BYTES_MAX: Final = 64 << 20
FETCH_BYTES: Final = 4 << 20
FETCH_MESSAGES: Final = 256

NOT_AVAILABLE: Final = 10008
STREAM_NOT_FOUND: Final = 10059
# JetStream's error code for a message larger than the stream, or the broker, allows.
TOO_LARGE: Final = 10054
# The second code is returned while an earlier message is still being stored.
WRONG_LAST_SEQUENCE: Final = (10071, 10164)


class BrokerSettings(NamedTuple):
    """The broker's address and credentials."""

    urls: list[str]
    user: str
    password: str
    tls: ssl.SSLContext | None = None


class BrokerRefusal(MillstreamError):
    """The broker answered with an error; `number` is JetStream's error code."""

    code = "broker_refused"

    def __init__(self, message: str, number: int) -> None:
        super().__init__(message)
        self.number = number


class Stored(NamedTuple):
    """A message stored in a JetStream stream."""

    sequence: int
    headers: dict[str, str]
    data: bytes


class BrokerLink:
    def __init__(self, settings: BrokerSettings, name: str, supervisor: Supervisor | None = None) -> None:
        self._settings = settings
        self._name = name
        self.supervisor = supervisor or Supervisor()
        self.loop: asyncio.AbstractEventLoop = uvloop.new_event_loop()
        self._thread = threading.Thread(target=self._run, name="millstream-broker", daemon=True)
        self.client: Client = Client()
        self.on_reconnect: list[Callable[[], None]] = []
        self._last_error = "no answer yet"
        self._turned_away: asyncio.Future[None] | None = None
        self._is_closed = False
        self._thread.start()

    def _run(self) -> None:
        asyncio.set_event_loop(self.loop)
        self.loop.run_forever()

    # -- from other threads ----------------------------------------------------------------------------------

    def submit(self, work: Coroutine[Any, Any, T]) -> Future[T]:
        if self._is_closed:  # the loop no longer runs, so the caller would wait for ever
            work.close()
            raise _closed()
        return asyncio.run_coroutine_threadsafe(work, self.loop)

    def wait(self, work: Coroutine[Any, Any, T], seconds: float | None = None) -> T:
        """Run a coroutine on the link's loop and block until it is done, the time is up, or the link is closed."""
        future = self.submit(work)
        try:
            return future.result(seconds)
        except TimeoutError as error:
            future.cancel()
            raise _unreachable(error) from None
        except CancelledError:
            raise _closed() from None

    def ask(self, work: Coroutine[Any, Any, T], seconds: float | None = None) -> Awaitable[T]:
        """Run a coroutine on the link's loop and await its result on the caller's loop."""
        return asyncio.wrap_future(self.submit(work if seconds is None else self._within(work, seconds)))

    @staticmethod
    async def _within(work: Coroutine[Any, Any, T], seconds: float) -> T:
        try:
            return await asyncio.wait_for(work, seconds)
        except TimeoutError as error:
            raise _unreachable(error) from None

    def close(self) -> None:
        """Disconnect from the broker. Calls that still wait for an answer fail."""
        if not self._is_closed:
            self._is_closed = True
            with contextlib.suppress(Exception):
                asyncio.run_coroutine_threadsafe(self._close(), self.loop).result(CONNECT_SECONDS)
            self.loop.call_soon_threadsafe(self.loop.stop)
            self._thread.join(CONNECT_SECONDS)

    async def _close(self) -> None:
        # Closing a client that was never connected fails, and closing one whose broker hangs does not end. Callers that
        # wait for an answer must get an error in both cases.
        try:
            await asyncio.wait_for(self.client.close(), CLOSE_SECONDS)
        except Exception as error:
            logger.debug("the broker's client did not close in order: %r", error)
        await end(*(task for task in asyncio.all_tasks() if task is not asyncio.current_task()))

    # -- on the link's loop ----------------------------------------------------------------------------------

    async def connect(self) -> None:
        """Connect once; from then on the link reconnects by itself whenever the broker is back.

        Waits for a broker that cannot be reached; a broker that refuses the connection is an error.
        """
        self._turned_away = self.loop.create_future()
        connecting = self.loop.create_task(self._connect())
        try:
            done: set[asyncio.Future[None]] = set()
            while not done:
                done, _ = await asyncio.wait(
                    {connecting, self._turned_away}, timeout=WAITING_SECONDS, return_when=asyncio.FIRST_COMPLETED
                )
                if not done:
                    logger.info("waiting for the broker at %s: %s", ", ".join(self._settings.urls), self._last_error)
            for task in done:
                task.result()
        finally:
            self._turned_away = None
            await end(connecting)

    async def _connect(self) -> None:
        settings = self._settings
        try:
            await self.client.connect(
                servers=settings.urls,
                name=self._name,
                user=settings.user or None,
                password=settings.password or None,
                tls=settings.tls,
                connect_timeout=int(CONNECT_SECONDS),
                reconnect_time_wait=RECONNECT_SECONDS,  # type: ignore[arg-type]  # a float works as well
                max_reconnect_attempts=-1,
                ping_interval=2,
                max_outstanding_pings=3,
                pending_size=PENDING_BYTES_MAX,
                error_cb=self._failed,
                reconnected_cb=self._reconnected,
                disconnected_cb=self._disconnected,
            )
        except (nats.errors.Error, OSError) as error:
            raise Unavailable(f"the broker at {', '.join(settings.urls)} cannot be reached: {error}") from None

    async def _failed(self, error: Exception) -> None:
        self._last_error = str(error) or type(error).__name__
        logger.debug("broker connection: %s", self._last_error)
        if self._turned_away is None or self._turned_away.done():
            return
        if isinstance(error, ssl.SSLCertVerificationError) or "Authorization Violation" in self._last_error:
            refusal = f"the broker at {', '.join(self._settings.urls)} cannot be used: {self._last_error}"
            self._turned_away.set_exception(BrokerRefusal(refusal, 0))

    async def _disconnected(self) -> None:
        if not self.client.is_closed:
            logger.warning("the connection to the broker is lost; trying again")

    async def _reconnected(self) -> None:
        logger.info("the connection to the broker is back")
        for callback in self.on_reconnect:
            callback()

    @property
    def payload_bytes_max(self) -> int:
        return int(self.client.max_payload)

    async def publish(self, subject: str, data: bytes, headers: dict[str, str] | None = None, reply: str = "") -> None:
        try:
            await self.client.publish(subject, data, reply=reply, headers=headers)
        except nats.errors.MaxPayloadError:
            limit = self.payload_bytes_max
            raise BrokerRefusal(f"{len(data)} bytes are more than the {limit} it takes", TOO_LARGE) from None
        except (nats.errors.Error, OSError) as error:
            raise _unreachable(error) from None

    async def subscribe(self, subject: str, callback: Callable[[Msg], Awaitable[None]]) -> Any:
        return await self.client.subscribe(subject, cb=callback, pending_bytes_limit=PENDING_BYTES_MAX)

    async def request(
        self,
        subject: str,
        data: bytes = b"",
        headers: dict[str, str] | None = None,
        seconds: float = REQUEST_SECONDS,
    ) -> Msg:
        try:
            return await self.client.request(subject, data, timeout=seconds, headers=headers)
        except (nats.errors.Error, OSError, TimeoutError) as error:
            raise _unreachable(error) from None

    async def call(self, operation: str, body: object = None, seconds: float = REQUEST_SECONDS) -> dict[str, Any]:
        """A request to JetStream's API, such as `STREAM.CREATE.name`."""
        data = msgspec.json.encode(body) if body is not None else b""
        message = await self.request(f"$JS.API.{operation}", data, seconds=seconds)
        return _checked(operation, message.data)

    async def info(self, stream: str, seconds: float = REQUEST_SECONDS) -> dict[str, Any]:
        """JetStream's description of a stream. No broker answers while the stream has no leader, so the request is
        repeated: a newly elected leader gets it at once, and a late answer to an earlier request still counts."""
        deadline = self.loop.time() + seconds
        inbox = self.client.new_inbox()
        try:
            subscription = await self.client.subscribe(inbox)
            try:
                while True:
                    await self.publish(f"$JS.API.STREAM.INFO.{stream}", b"", reply=inbox)
                    found = await self._first_answer(stream, subscription, min(ASK_AGAIN_SECONDS, seconds))
                    if found is not None:
                        return found
                    if self.loop.time() >= deadline:
                        raise _unreachable(TimeoutError(f"no replica of {stream} leads"))
            finally:
                with contextlib.suppress(nats.errors.Error):
                    await subscription.unsubscribe()
        except (nats.errors.Error, OSError) as error:
            raise _unreachable(error) from None

    async def _first_answer(self, stream: str, subscription: Any, seconds: float) -> dict[str, Any] | None:
        """The first answer with content within a time; None if there is none."""
        until = self.loop.time() + seconds
        while (left := until - self.loop.time()) > 0:
            try:
                message = await subscription.next_msg(timeout=left)
            except TimeoutError:
                return None
            if message.data:
                try:
                    return _checked(f"STREAM.INFO.{stream}", message.data)
                except BrokerRefusal as refusal:
                    if refusal.number != NOT_AVAILABLE:
                        raise
        return None

    async def store(self, subject: str, data: bytes, headers: dict[str, str], seconds: float = REQUEST_SECONDS) -> int:
        """Publish into a stream and wait until the message is stored; returns its sequence."""
        message = await self.request(subject, data, headers, seconds)
        return int(_checked(subject, message.data)["seq"])

    async def last(self, stream: str, subject: str) -> Stored | None:
        """The last message of a subject, from any replica."""
        found = await self._ask_replicas(f"{stream}.{subject}", b"", REQUEST_SECONDS, is_many=False)
        return found[0] if found else None

    async def fetch(self, stream: str, sequence: int, *, messages: int = FETCH_MESSAGES) -> list[Stored]:
        """Stored messages from a sequence on, from any replica; empty if it has none."""
        if messages == 1:
            return await self._fetch_one(stream, sequence)
        body = {"seq": sequence, "batch": messages, "max_bytes": FETCH_BYTES, "next_by_subj": ">"}
        found = await self._ask_replicas(stream, msgspec.json.encode(body), REQUEST_SECONDS)
        for index, stored in enumerate(found):
            if stored.sequence != found[0].sequence + index:
                return found[:index]  # a message was lost on the way; the next fetch brings it
        return found or await self._fetch_one(stream, sequence)

    async def fetch_last(self, stream: str, subject: str, seconds: float = REQUEST_SECONDS) -> list[Stored]:
        """The last message of every subject that matches a pattern."""
        return await self._ask_replicas(stream, msgspec.json.encode({"multi_last": [subject]}), seconds)

    async def _fetch_one(self, stream: str, sequence: int) -> list[Stored]:
        body = msgspec.json.encode({"seq": sequence, "next_by_subj": ">"})
        return await self._ask_replicas(stream, body, REQUEST_SECONDS, is_many=False)

    async def _ask_replicas(self, what: str, body: bytes, seconds: float, *, is_many: bool = True) -> list[Stored]:
        """Read from a replica. The replica that the broker chooses may be partitioned and never answer; then another
        one is asked, with a longer timeout each time."""
        deadline = self.loop.time() + seconds
        patience = ASK_AGAIN_SECONDS
        while (left := deadline - self.loop.time()) > 0:
            found = await self._ask_replica(what, body, min(patience, left), seconds, is_many)
            if found is not None:
                return found
            patience *= 2
        raise _unreachable(TimeoutError(f"no replica of {what} answers"))

    async def _ask_replica(
        self, what: str, body: bytes, patience: float, seconds: float, is_many: bool
    ) -> list[Stored] | None:
        """Ask once; None if the answer does not begin within `patience` seconds."""
        inbox = self.client.new_inbox()
        found: list[Stored] = []
        try:
            subscription = await self.client.subscribe(inbox)
            try:
                await self.publish(f"$JS.API.DIRECT.GET.{what}", body, reply=inbox)
                try:
                    message = await subscription.next_msg(timeout=patience)
                except TimeoutError:
                    return None
                if (message.headers or {}).get("Status") == NO_RESPONDERS:
                    await asyncio.sleep(patience)
                    return None
                while (stored := _stored(message)) is not None:
                    found.append(stored)
                    if not is_many:
                        break
                    message = await subscription.next_msg(timeout=seconds)
            finally:
                with contextlib.suppress(nats.errors.Error):
                    await subscription.unsubscribe()
        except (nats.errors.Error, OSError, TimeoutError) as error:
            raise _unreachable(error) from None
        return found


def _checked(operation: str, data: bytes) -> dict[str, Any]:
    answer: dict[str, Any] = msgspec.json.decode(data)
    error = answer.get("error")
    if error is not None:
        raise BrokerRefusal(f"{operation}: {error.get('description', error)}", int(error.get("err_code", 0)))
    return answer


def _stored(message: Msg) -> Stored | None:
    """The message in the answer to a direct get; None if the answer is only a status."""
    headers = message.headers or {}
    if "Status" in headers or "Nats-Sequence" not in headers:
        return None
    return Stored(int(headers["Nats-Sequence"]), headers, message.data)


def _closed() -> Unavailable:
    return Unavailable("the connection to the broker is closed: this node stops", code="broker_unavailable")


def _unreachable(error: BaseException) -> Unavailable:
    return Unavailable(
        f"the broker does not answer: {str(error) or type(error).__name__}",
        code="broker_unavailable",
        hint="writing resumes by itself when a majority of the brokers is up",
    )
