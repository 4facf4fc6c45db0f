"""Who owns an object store: one owner at a time for each shard, by an epoch.

    owner/<shard>/<epoch>.json

Each object is created once and only if it does not exist, which every store can do; so of several who want an epoch
exactly one gets it. The highest epoch is the owner, and whoever had one before it writes and deletes nothing more.
`store` names the store itself: it is made up by its first owner and handed on by each to the next. `claim` is the
random name of one attempt to become the owner: by it an attempt whose answer was lost is recognised. `since` is the
first epoch of an unbroken history: manifests of earlier epochs are another's, and not this one's to delete.

The body is JSON, for people, and ends in a checksum of the rest.
"""

from __future__ import annotations

import re
import zlib
from typing import Final

import msgspec

from millstream.errors import Corrupt, NotFound, Unavailable
from millstream.tiers.objects import Objects
from millstream.units import Milliseconds

KEPT: Final = 8  # owners that stay to be seen; all before them are only history
DAMAGED_HINT: Final = (
    "put the object back from a backup or an older version of it; if there is none, and this is the data directory that"
    " should own the store, start once with --set cold.take_over=true; nothing in the store is deleted then or later"
)
_PATH: Final = re.compile(r"owner/\d{4}/(\d{20})\.json")


class Owner(msgspec.Struct, frozen=True):
    store: str
    epoch: int
    since: int
    claim: str
    who: str
    at_ms: Milliseconds


class _Stored(msgspec.Struct, frozen=True):
    owner: msgspec.Raw
    crc32: int


def owner_path(shard: int, epoch: int) -> str:
    return f"owner/{shard:04d}/{epoch:020d}.json"


def encode_owner(owner: Owner) -> bytes:
    body = msgspec.json.encode(owner)
    return msgspec.json.encode(_Stored(msgspec.Raw(body), zlib.crc32(body)))


def decode_owner(data: bytes, path: str) -> Owner:
    try:
        stored = msgspec.json.decode(data, type=_Stored)
        if zlib.crc32(stored.owner) != stored.crc32:
            raise Corrupt(
                f"the object {path} is damaged: its checksum differs", code="object_damaged", hint=DAMAGED_HINT
            )
        return msgspec.json.decode(stored.owner, type=Owner)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise Corrupt(f"the object {path} cannot be read: {error}", code="object_damaged", hint=DAMAGED_HINT) from None


async def epochs(objects: Objects, shard: int) -> list[int]:
    """The epochs there are, in order."""
    found = []
    async for entry in objects.list(f"owner/{shard:04d}/"):
        match = _PATH.fullmatch(entry.path)
        if match is not None:
            found.append(int(match[1]))
    return sorted(found)


async def newest_owner(objects: Objects, shard: int) -> Owner | None:
    """Who owns the shard's part of the store; None if nobody ever did."""
    for _ in range(3):
        known = await epochs(objects, shard)
        if not known:
            return None
        path = owner_path(shard, known[-1])
        try:
            return decode_owner(await objects.get(path), path)
        except NotFound:
            continue  # a later one came meanwhile, and removed it
    raise Unavailable("the owner of the object store changes all the time", code="object_store_unavailable")


async def presumed_owner(objects: Objects, shard: int) -> Owner | None:
    """The newest owner, or what can be told of one whose object is damaged: its epoch, which is in the object's name.

    Whoever comes after it takes the next epoch, as after any other, and begins a history of its own with it: where the
    one before began nobody knows.
    """
    try:
        return await newest_owner(objects, shard)
    except Corrupt:
        known = await epochs(objects, shard)
    for epoch in reversed(known):
        path = owner_path(shard, epoch)
        try:
            store = decode_owner(await objects.get(path), path).store
            break
        except (Corrupt, NotFound):
            continue
    else:
        store = ""
    newest = known[-1]
    somebody = f"somebody unknown ({owner_path(shard, newest)} is damaged)"
    return Owner(store, newest, newest + 1, "", somebody, Milliseconds(0))


async def become_owner(objects: Objects, shard: int, owner: Owner) -> Owner:
    """Create the owner's object. Returns who has its epoch: another, if that one was quicker."""
    path = owner_path(shard, owner.epoch)
    try:
        await objects.put(path, encode_owner(owner))
    except Unavailable as error:
        if error.code != "object_exists":
            raise
        return decode_owner(await objects.get(path), path)
    for epoch in (await epochs(objects, shard))[:-KEPT]:
        if epoch != owner.since:  # its age tells what is older than this history
            await objects.delete(owner_path(shard, epoch))
    return owner
