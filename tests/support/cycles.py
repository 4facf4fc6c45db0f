"""Streams that come and go, for tests of what they leave behind."""

from __future__ import annotations

import asyncio

from millstream.protocol.expiry import Expiry
from support.shards import ShardDriver

YEAR = Expiry(365 * 86_400)


async def cycles(driver: ShardDriver, count: int, expiry: Expiry = YEAR, together: int = 500) -> None:
    """Create, append, delete, with a flush now and then, as a server does it."""
    for first in range(0, count, together):
        names = [f"cycle{number % 50}/{number}" for number in range(first, first + together)]
        await asyncio.gather(
            *(driver.create(name, content_type="text/plain", body=b"first", expiry=expiry) for name in names)
        )
        await asyncio.gather(*(driver.append(name, b"second") for name in names))
        if (first // together) % 2:
            await driver.checkpoint()
        await asyncio.gather(*(driver.delete(name) for name in names))
    await driver.checkpoint()
