"""The Python client as the official client suite drives it: one JSON command a line in, one JSON answer a line out.

    python tests/conformance/client_adapter.py [--async] [--retries=N]

Everything goes through what `millstream.client` exports. A command `append` is an append that must be written once,
because the suite expects it to be repeated when its answer is lost.
"""

from __future__ import annotations

import json
import sys
import time
from base64 import b64decode, b64encode
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

from millstream import __version__
from millstream.client import (
    AsyncClient,
    BadAnswer,
    BadRequest,
    Chunk,
    Client,
    ClientError,
    Conflict,
    ConnectionFailed,
    Gone,
    NotFound,
    OffsetTrimmed,
    OutcomeUnknown,
    Producer,
    ProducerFenced,
    RetryPolicy,
    SequenceGap,
    StreamClosed,
)
from support.clients import Awaited, Loop

JSON = "application/json"
FEATURES = (
    "batching",
    "sse",
    "longPoll",
    "auto",
    "streaming",
    "dynamicHeaders",
    "retryOptions",
    "batchItems",
    "strictZeroValidation",
)
READ_TIMEOUT_MS = 5000
CHUNKS_MAX = 100

Command = dict[str, Any]
Answer = dict[str, Any]

# What the suite calls the arguments, by our names for them.
RETRY_OPTIONS = {
    "retries": "maxRetries",
    "first_pause_seconds": "initialDelayMs",
    "pause_seconds_max": "maxDelayMs",
    "multiplier": "multiplier",
}
PRODUCER_OPTIONS = {
    "id": "producerId",
    "epoch": "epoch",
    "batch_bytes": "maxBatchBytes",
    "batch_messages": "maxBatchItems",
}


class Dynamic:
    """Headers or parameters whose values are made for each request, and which of them a command has sent."""

    def __init__(self) -> None:
        self._values: dict[str, Callable[[], str]] = {}
        self.sent: dict[str, str] = {}

    def set(self, name: str, kind: str, initial: str) -> None:
        count = 0

        def counter() -> str:
            nonlocal count
            count += 1
            return str(count)

        makers = {"counter": counter, "timestamp": lambda: str(time.time_ns() // 1_000_000), "token": lambda: initial}
        self._values[name] = makers[kind]

    def clear(self) -> None:
        self._values.clear()

    def values(self) -> dict[str, str | Callable[[], str]]:
        """For one command, whose first request is what it reports."""
        self.sent = {}

        def recorded(name: str, make: Callable[[], str]) -> Callable[[], str]:
            def value() -> str:
                made = make()
                self.sent.setdefault(name, made)
                return made

            return value

        return {name: recorded(name, make) for name, make in self._values.items()}


class Adapter:
    def __init__(self, connect: Callable[..., Any], name: str) -> None:
        self._connect = connect
        self._name = name
        self._client: Any = None
        self._url = ""
        self._headers, self._params = Dynamic(), Dynamic()
        self._content_types: dict[str, str] = {}
        self._producers: dict[tuple[str, str, int], Any] = {}
        self._handlers: dict[str, Callable[[Command], Answer]] = {
            "init": self._init,
            "create": self._create,
            "connect": self._head,
            "head": self._head,
            "append": self._append,
            "close": self._close,
            "delete": self._delete,
            "read": self._read,
            "idempotent-append": self._produce,
            "idempotent-append-batch": self._produce_batch,
            "idempotent-close": self._close_producer,
            "idempotent-detach": self._detach_producer,
            "set-dynamic-header": self._set_header,
            "set-dynamic-param": self._set_param,
            "clear-dynamic": self._clear_dynamic,
            "validate": self._validate,
            "benchmark": self._benchmark,
            "shutdown": self._shut_down,
        }

    def answer(self, command: Command) -> Answer:
        handler = self._handlers.get(command["type"])
        if handler is None:
            return _failure(command, "NOT_SUPPORTED", f"there is no command {command['type']!r}")
        try:
            return {"type": command["type"], "success": True, **handler(command)}
        except ClientError as error:
            return _refusal(command, error)
        except Exception as error:
            return _failure(command, "INTERNAL_ERROR", f"{type(error).__name__}: {error}")

    def _init(self, command: Command) -> Answer:
        self._shut_down(command)
        self._url = command["serverUrl"].rstrip("/")
        timeout = command.get("timeoutMs", 30_000) / 1000
        self._client = self._connect(self._url, timeout=timeout)
        self._headers, self._params = Dynamic(), Dynamic()
        self._content_types, self._producers = {}, {}
        features = dict.fromkeys(FEATURES, True)
        return {"clientName": self._name, "clientVersion": __version__, "features": features}

    def _shut_down(self, command: Command) -> Answer:
        for producer in self._producers.values():
            producer.abort()
        if self._client is not None:
            self._client.close()
            self._client = None
        return {}

    def _stream(self, command: Command) -> Any:
        path = command["path"]
        return self._client.stream(f"{self._url}{path}", content_type=self._content_types.get(path))

    def _sending(self, command: Command) -> dict[str, Any]:
        """What a command's requests carry beside the protocol's own; the command's headers go before the dynamic."""
        return {"headers": {**self._headers.values(), **command.get("headers", {})}, "params": self._params.values()}

    def _sent(self) -> Answer:
        sent = {"headersSent": self._headers.sent, "paramsSent": self._params.sent}
        return {name: values for name, values in sent.items() if values}

    # -- streams -----------------------------------------------------------------------------------------------

    def _create(self, command: Command) -> Answer:
        created = self._stream(command).create(
            content_type=command.get("contentType"),
            ttl=command.get("ttlSeconds"),
            expires_at=command.get("expiresAt"),
            closed=command.get("closed", False),
            body=_payload(command) if "data" in command else None,
            headers=command.get("headers"),
        )
        self._content_types[command["path"]] = created.content_type
        headers = {"content-type": created.content_type}
        return {"status": 201 if created.is_new else 200, "offset": created.next_offset, "headers": headers}

    def _head(self, command: Command) -> Answer:
        info = self._stream(command).head(headers=command.get("headers"))
        self._content_types[command["path"]] = info.content_type
        told = {
            "contentType": info.content_type,
            "ttlSeconds": info.ttl_seconds,
            "expiresAt": info.expires_at,
            "streamClosed": info.closed,
        }
        return {"status": 200, "offset": info.next_offset} | {k: v for k, v in told.items() if v is not None}

    def _append(self, command: Command) -> Answer:
        stream, seq = self._stream(command), command.get("seq")
        claim = None
        if "producerId" in command:
            claim = Producer(command["producerId"], command.get("producerEpoch", 0), command.get("producerSeq", 0))
        appended = stream.append(
            _payload(command),
            seq=None if seq is None else str(seq),
            producer=claim,
            once=claim is None,
            **self._sending(command),
        )
        answer: Answer = {"status": 200, "offset": appended.next_offset, **self._sent()}
        if claim is not None:
            answer |= {"status": 204 if appended.duplicate else 200, "duplicate": appended.duplicate}
            answer |= {"producerEpoch": claim.epoch, "producerSeq": appended.producer_seq}
        return answer

    def _close(self, command: Command) -> Answer:
        stream = self._stream(command)
        if command.get("data") is None:
            closed = stream.close(**self._sending(command))
        else:
            kind = command.get("contentType")
            closed = stream.append(
                _payload(command), close=True, once=True, content_type=kind, **self._sending(command)
            )
        return {"status": 200, "finalOffset": closed.next_offset, **self._sent()}

    def _delete(self, command: Command) -> Answer:
        self._stream(command).delete(headers=command.get("headers"))
        self._content_types.pop(command["path"], None)
        return {"status": 200}

    # -- reading -----------------------------------------------------------------------------------------------

    def _read(self, command: Command) -> Answer:
        offset = command.get("offset") or "-1"
        live = command.get("live") or False
        return self._catch_up(command, offset) if live is False else self._follow(command, offset, live)

    def _catch_up(self, command: Command, offset: str) -> Answer:
        chunks: list[Answer] = []
        last: Chunk | None = None
        for last in self._stream(command).read(offset, **self._sending(command)):
            chunks += _described(last)
            if len(chunks) >= command.get("maxChunks", CHUNKS_MAX):
                break
        assert last is not None, "a read has at least one answer"
        return {
            "status": 200,
            "chunks": chunks,
            "offset": last.next_offset,
            "upToDate": last.up_to_date,
            "streamClosed": last.closed,
            "cursor": last.cursor,
            **self._sent(),
        }

    def _follow(self, command: Command, offset: str, live: bool | str) -> Answer:
        following = self._stream(command).follow(
            offset,
            "auto" if live is True else live,
            until_up_to_date=command.get("waitForUpToDate", False),
            timeout=command.get("timeoutMs", READ_TIMEOUT_MS) / 1000,
            **self._sending(command),
        )
        chunks: list[Answer] = []
        has_more = False
        with following:
            for chunk in following:
                chunks += _described(chunk)
                has_more = len(chunks) >= command.get("maxChunks", CHUNKS_MAX)
                if has_more:
                    break
        return {
            "status": 200,
            "chunks": chunks,
            "offset": following.offset,
            # Whoever waited until the time was over had nothing more to read.
            "upToDate": following.up_to_date or not has_more,
            "streamClosed": following.closed,
            "cursor": following.cursor,
            **self._sent(),
        }

    # -- producers ---------------------------------------------------------------------------------------------

    def _producer(self, command: Command) -> Any:
        """The producer of this id and epoch on this stream: its sequence goes on from one command to the next."""
        key = (command["path"], command["producerId"], command.get("epoch") or 0)
        if key not in self._producers:
            in_flight = command.get("maxInFlight") or 1
            self._producers[key] = self._client.producer(
                self._stream(command),
                command["producerId"],
                command.get("epoch") or 0,
                claim=command.get("autoClaim", False),
                in_flight=in_flight,
                # Several batches are on their way only if one does not hold everything.
                batch_messages=1 if in_flight > 1 else None,
                concatenate=True,
            )
        return self._producers[key]

    def _forget_producer(self, command: Command) -> None:
        producer = self._producers.pop((command["path"], command["producerId"], command.get("epoch") or 0), None)
        if producer is not None:
            producer.abort()

    def _producing(self, command: Command, work: Callable[[Any], None]) -> Any:
        try:
            work(self._producer(command))
        except ProducerFenced:
            self._forget_producer(command)
            if not command.get("autoClaim"):
                raise
            work(self._producer(command))  # a new one, which claims the next epoch
        except ClientError:
            self._forget_producer(command)
            raise
        return self._producer(command)

    def _produce(self, command: Command) -> Answer:
        value = self._message(command, command["data"])
        before = self._producer(command).duplicates

        def work(producer: Any) -> None:
            producer.append(value)
            producer.flush()

        producer = self._producing(command, work)
        return {
            "status": 200,
            "offset": producer.next_offset,
            "duplicate": producer.duplicates > before,
            "producerSeq": producer.acknowledged_seq,
        }

    def _produce_batch(self, command: Command) -> Answer:
        items = [item["data"] if isinstance(item, dict) else item for item in command["items"]]
        values = [self._message(command, item) for item in items]

        def work(producer: Any) -> None:
            producer.append_many(values)
            producer.flush()

        return {"status": 200, "producerSeq": self._producing(command, work).acknowledged_seq}

    def _message(self, command: Command, data: str) -> object:
        content_type = self._content_types.get(command["path"])
        if content_type is None:
            content_type = self._content_types[command["path"]] = self._stream(command).content_type()
        if content_type.partition(";")[0].strip().lower() == JSON:
            return json.loads(data)
        return data.encode()

    def _close_producer(self, command: Command) -> Answer:
        data = command.get("data")
        final = None if data is None else self._message(command, data)
        producer = self._producing(command, lambda one: one.close(close_stream=True, final=final))
        return {"status": 200, "finalOffset": producer.next_offset}

    def _detach_producer(self, command: Command) -> Answer:
        self._producing(command, lambda one: one.detach())
        self._forget_producer(command)
        return {"status": 200}

    # -- the rest ----------------------------------------------------------------------------------------------

    def _set_header(self, command: Command) -> Answer:
        self._headers.set(command["name"], command["valueType"], command.get("initialValue", ""))
        return {}

    def _set_param(self, command: Command) -> Answer:
        self._params.set(command["name"], command["valueType"], command.get("initialValue", ""))
        return {}

    def _clear_dynamic(self, command: Command) -> Answer:
        self._headers.clear()
        self._params.clear()
        return {}

    def _validate(self, command: Command) -> Answer:
        target = command["target"]
        if target["target"] == "retry-options":
            _check(RETRY_OPTIONS, target, lambda given: RetryPolicy(**given))
        else:
            handle = self._client.stream(f"{self._url}/validated", content_type=JSON)
            _check(PRODUCER_OPTIONS, target, lambda given: self._client.producer(handle, **given).abort())
        return {}

    def _benchmark(self, command: Command) -> Answer:
        operation = command["operation"]
        work = {
            "append": self._time_append,
            "read": self._time_read,
            "roundtrip": self._time_roundtrip,
            "create": self._time_create,
            "throughput_append": self._time_appends,
            "throughput_read": self._time_reads,
        }[operation["op"]]
        stream = self._stream(operation)
        began = time.perf_counter_ns()
        messages, size = work(stream, operation)
        nanoseconds = time.perf_counter_ns() - began
        metrics = {
            "bytesTransferred": size,
            "messagesProcessed": messages,
            "opsPerSecond": messages * 1e9 / nanoseconds,
            "bytesPerSecond": size * 1e9 / nanoseconds,
        }
        return {"iterationId": command["iterationId"], "durationNs": str(nanoseconds), "metrics": metrics}

    @staticmethod
    def _time_append(stream: Any, operation: Command) -> tuple[int, int]:
        stream.append(b"x" * operation["size"])
        return 1, operation["size"]

    @staticmethod
    def _time_read(stream: Any, operation: Command) -> tuple[int, int]:
        return 1, sum(len(chunk.data) for chunk in stream.read(operation.get("offset") or "-1"))

    @staticmethod
    def _time_roundtrip(stream: Any, operation: Command) -> tuple[int, int]:
        content_type = operation.get("contentType", "application/octet-stream")
        stream.create(content_type=content_type)
        body = b"x" * operation["size"]
        stream.append(json.dumps([body.decode()]).encode() if content_type == JSON else body)
        with stream.follow(mode=operation.get("live", "long-poll"), timeout=30.0) as following:
            return 1, len(next(following).data)

    @staticmethod
    def _time_create(stream: Any, operation: Command) -> tuple[int, int]:
        stream.create(content_type=operation.get("contentType", "application/octet-stream"))
        return 1, 0

    def _time_appends(self, stream: Any, operation: Command) -> tuple[int, int]:
        count, size = operation["count"], operation["size"]
        body: object = "x" * size if stream.content_type() == JSON else b"x" * size
        options = {"in_flight": operation["concurrency"], "concatenate": True, "claim": True}
        with self._client.producer(stream, "benchmark", **options) as producer:
            producer.append_many([body] * count)
        return count, count * size

    @staticmethod
    def _time_reads(stream: Any, operation: Command) -> tuple[int, int]:
        chunks = list(stream.read())
        return sum(len(chunk.messages()) for chunk in chunks), sum(len(chunk.data) for chunk in chunks)


def _check(names: dict[str, str], target: Command, build: Callable[[dict[str, Any]], object]) -> None:
    """Build what these options describe; what is wrong with one is told by the suite's name for it."""
    given = {ours: target[theirs] for ours, theirs in names.items() if target.get(theirs) is not None}
    for ours in ("first_pause_seconds", "pause_seconds_max"):
        if ours in given:
            given[ours] /= 1000
    try:
        build(given)
    except BadRequest as error:
        wrong = next((theirs for ours, theirs in names.items() if error.message.startswith(f"{ours}=")), "producerId")
        raise BadRequest(f"{wrong}: {error.message}") from None


def _payload(command: Command) -> bytes:
    return b64decode(command["data"]) if command.get("binary") else command["data"].encode()


def _described(chunk: Chunk) -> list[Answer]:
    """A chunk as the suite compares it: JSON without spaces, text as it is, anything else in base64."""
    if chunk.content_type.partition(";")[0].strip().lower() == JSON:
        values = chunk.json()
        compact = json.dumps(values, separators=(",", ":"), ensure_ascii=False)
        return [{"data": compact, "offset": chunk.next_offset}] if values else []
    if not chunk.data:
        return []
    try:
        return [{"data": chunk.data.decode(), "offset": chunk.next_offset}]
    except UnicodeDecodeError:
        return [{"data": b64encode(chunk.data).decode(), "binary": True, "offset": chunk.next_offset}]


def _refusal(command: Command, error: ClientError) -> Answer:
    answer = _failure(command, _code(command, error), error.message)
    if error.status is not None:
        answer["status"] = error.status
    if isinstance(error, ProducerFenced):
        answer["producerEpoch"] = error.current_epoch
    if isinstance(error, SequenceGap):
        answer |= {"producerExpectedSeq": error.expected, "producerReceivedSeq": error.received}
    return answer


def _code(command: Command, error: ClientError) -> str:
    if isinstance(error, ConnectionFailed | OutcomeUnknown):
        return "TIMEOUT" if isinstance(error, ConnectionFailed) and error.timed_out else "NETWORK_ERROR"
    if isinstance(error, StreamClosed):
        return "STREAM_CLOSED"
    if isinstance(error, Conflict):
        return "SEQUENCE_CONFLICT" if isinstance(error, SequenceGap) or "seq" in command else "CONFLICT"
    if isinstance(error, NotFound | Gone) and not isinstance(error, OffsetTrimmed):
        return "NOT_FOUND"
    if isinstance(error, OffsetTrimmed) or (isinstance(error, BadRequest) and command["type"] == "read"):
        return "INVALID_OFFSET"
    if isinstance(error, BadRequest) and error.status is None:
        return "INVALID_ARGUMENT"
    return "PARSE_ERROR" if isinstance(error, BadAnswer) else "UNEXPECTED_STATUS"


def _failure(command: Command, code: str, message: str) -> Answer:
    return {
        "type": "error",
        "success": False,
        "commandType": command["type"],
        "errorCode": code,
        "message": message,
    }


def main(arguments: list[str]) -> None:
    loop = Loop() if "--async" in arguments else None
    retries = next((int(one.removeprefix("--retries=")) for one in arguments if one.startswith("--retries=")), 8)

    def connect(url: str, **options: Any) -> Any:
        options = {"retries": retries, **options}
        return Client(url, **options) if loop is None else Awaited(AsyncClient(url, **options), loop)

    adapter = Adapter(connect, "millstream-async" if loop is not None else "millstream")
    for line in sys.stdin:
        if not line.strip():
            continue
        command = json.loads(line)
        print(json.dumps(adapter.answer(command)), flush=True)
        if command["type"] == "shutdown":
            break


if __name__ == "__main__":
    main(sys.argv[1:])
