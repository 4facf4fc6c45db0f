"""What a user might write, for type checkers to read; nothing runs it."""

from __future__ import annotations

import asyncio
import time

from millstream.client import (
    Appended,
    AsyncClient,
    AsyncStream,
    Chunk,
    Client,
    ClientError,
    OutcomeUnknown,
    Producer,
    ProducerFenced,
    RetryPolicy,
    SequenceGap,
    Stream,
    StreamClosed,
    StreamInfo,
)


def fresh_token() -> str:
    return str(time.time())


async def awaited_token() -> str:
    await asyncio.sleep(0)
    return "token"


def blocking() -> list[str]:
    offsets: list[str] = []
    policy = RetryPolicy(retries=3, first_pause_seconds=0.5, multiplier=3.0)
    headers = {"x-app": "example"}
    with Client(
        "http://127.0.0.1:4437", fresh_token, headers=headers, params={"t": fresh_token}, retries=policy
    ) as client:
        stream = client.stream("agents/run-42", content_type="application/json")
        if stream.create(content_type="application/json", headers={"x-request": fresh_token}).is_new:
            info: StreamInfo = stream.head()
            offsets.append(info.next_offset)
        appended: Appended = stream.append({"step": 1}, once=True)
        stream.append(b"[2]", producer=Producer("p", 0, 0), close=False)
        offsets.append(appended.next_offset)
        for chunk in stream.read():
            offsets.append(chunk.next_offset)
        with stream.follow(mode="sse", until_up_to_date=True, timeout=5.0) as following:
            for chunk in following:
                print(chunk.json(), chunk.cursor, following.offset)
        with client.producer(stream, "worker", claim=True, batch_messages=100) as producer:
            producer.append({"step": 3})
            producer.close(final={"last": True})
        for entry in client.bucket("agents").list(prefix="run-"):
            offsets.append(entry.name)
        for page in client.bucket("agents").feed():
            offsets += [item.stream for item in page.items]
    with Stream("http://127.0.0.1:4437/any/path", token=fresh_token) as other:
        offsets += [chunk.next_offset for chunk in other.follow("now", timeout=1.0)]
    return offsets


async def awaiting() -> bytes:
    async with AsyncClient(["http://one:4437", "http://two:4437"], awaited_token) as client:
        stream = client.stream(bucket="agents", name="run-42")
        await stream.create()
        try:
            await stream.append(b"data", seq="1", headers={"x-request": awaited_token})
        except StreamClosed as error:
            print(error.next_offset, error.hint)
        except SequenceGap as error:
            print(error.expected - error.received)
        except OutcomeUnknown:
            raise
        except ClientError as error:
            print(error.status, error.code)
        async with client.producer(stream, "worker") as producer:
            try:
                await producer.append(b"message")
                await producer.flush(timeout=1.0)
            except ProducerFenced as error:
                print(error.current_epoch)
        chunks: list[Chunk] = [chunk async for chunk in stream.follow(until_up_to_date=True)]
        async with AsyncStream("http://127.0.0.1:4437/any/path", client=None) as other:
            chunks += [chunk async for chunk in other.read()]
        return b"".join(chunk.data for chunk in chunks) + await stream.read_all()
