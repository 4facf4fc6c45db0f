"""Leftovers: objects that a crash, or a flush that failed, has left in the store, and that may be deleted.

An object is one only if all of this holds:

- the catalog, the log and this process know nothing of it;
- no manifest in the store names it: of those that count, what they amount to, without what they say was replaced (of
  which only a restored server's catalog knows nothing); of all others, which may be somebody's
  only history, everything they ever named;
- it was written after our own history began: after a restore that accepted a loss, or a start that was forced, nothing
  from before is touched;
- it has an age, by the store's own clock: it was written that long before the newest object there. So neither a
  wrong clock here nor one that was set can make it old;
- it was found so before, at least an hour (or that age) ago by a clock that does not jump.

A manifest is one if it was overtaken: another of our own history, written by the same owner or a later one, leads on
from the same place and at least as far. Whatever it names goes later, when nothing names it any more.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Final

from millstream.errors import NotFound
from millstream.shard.flush.flusher import Flusher
from millstream.shard.parts import ShardParts
from millstream.shard.restore import find_manifests, load_manifest
from millstream.tiers.manifests import Chain, ColdView, Manifest, ManifestHead
from millstream.tiers.objects import ObjectInfo
from millstream.tiers.owners import owner_path
from millstream.tiers.stored_names import shard_and_position

SEEN_SECONDS_MAX: Final = 3600.0
CANDIDATES_MAX: Final = 100_000


class Leftovers:
    def __init__(
        self, parts: ShardParts, flusher: Flusher, age_seconds: float, is_blob_known: Callable[[str], bool]
    ) -> None:
        self._cold = parts.cold
        self._catalog = parts.catalog
        self._clock = parts.clock
        self._shard = parts.number
        self._flusher = flusher
        self._age_seconds = age_seconds
        self._is_blob_known = is_blob_known
        # When each candidate was first seen to be one.
        self._seen: dict[str, float] = {}
        # What was written before this, by the store's clock, is old enough; known once it was looked for.
        self.before_ms = 0.0

    async def find(self, since: int) -> list[str]:
        """What may be deleted now, manifests first. `since` is the first epoch of our own history."""
        entries: dict[str, ObjectInfo] = {}
        for prefix in ("segments/", "snapshots/", f"notes/{self._shard:04d}/", f"manifests/{self._shard:04d}/"):
            entries.update({entry.path: entry async for entry in self._cold.objects.list(prefix)})
        newest_ms = max((entry.modified_ms for entry in entries.values()), default=0)
        self.before_ms = before_ms = newest_ms - self._age_seconds * 1000
        after_ms = await self._history_began_ms(since)
        unknown = self._unknown([one for one in entries.values() if one.modified_ms > after_ms], before_ms)
        manifests = [path for path in entries if self._is_our_manifest(path)]
        found: list[str] = []
        if unknown or len(manifests) > 1:
            found = await self._unnamed(unknown, before_ms, entries, since)
        now = self._clock.monotonic()
        self._seen = {path: self._seen.get(path, now) for path in found[:CANDIDATES_MAX]}
        waited = min(self._age_seconds, SEEN_SECONDS_MAX)
        return [path for path, seen in self._seen.items() if now - seen >= waited]

    async def _history_began_ms(self, since: int) -> float:
        """When our history began, by the store's clock: what was written before may be of one that was given up."""
        if since == 0:
            return float("-inf")
        try:
            return (await self._cold.objects.head(owner_path(self._shard, since))).modified_ms
        except NotFound:
            return float("inf")

    def is_unknown(self, path: str) -> bool:
        """Whether nothing here refers to an object, at this moment."""
        if path.startswith("snapshots/"):
            return not self._is_blob_known(path.removeprefix("snapshots/"))
        return path not in self._known()

    def _known(self) -> set[str]:
        known = {row.segment.path for _, row in self._catalog.segments()}
        known |= {flush.notes for _, flush in self._catalog.flushes()}
        return known | self._flusher.unlisted_paths()

    def _unknown(self, entries: Iterable[ObjectInfo], before_ms: float) -> list[str]:
        """The objects of this shard that are old, and that nothing here refers to."""
        known = self._known()
        found = []
        for path, _, modified_ms in entries:
            if modified_ms >= before_ms:
                continue
            if path.startswith("snapshots/"):
                if not self._is_blob_known(path.removeprefix("snapshots/")):
                    found.append(path)
            elif not path.startswith("manifests/"):
                place = shard_and_position(path)
                if place is not None and place[0] == self._shard and path not in known:
                    found.append(path)
        return found

    def _is_our_manifest(self, path: str) -> bool:
        return path.startswith(f"manifests/{self._shard:04d}/") and shard_and_position(path) is not None

    async def _unnamed(
        self, unknown: list[str], before_ms: float, entries: dict[str, ObjectInfo], since: int
    ) -> list[str]:
        manifests = await find_manifests(self._cold, self._shard)
        chain = manifests.chain
        overtaken = [
            head.path
            for head in chain.passed
            if head.path in entries and entries[head.path].modified_ms < before_ms and self.is_unknown(head.path)
            if head.epoch >= since and _is_overtaken(head, chain)
        ]
        if not unknown or manifests.damaged:
            return overtaken  # what a damaged manifest names nobody knows
        named = await self._named(chain)
        return overtaken + [path for path in unknown if path not in named]

    async def _named(self, chain: Chain) -> set[str]:
        """Whatever a manifest in the store refers to."""
        view, named = ColdView(), set[str]()
        blobs: dict[int, bytes | None] = {}
        for head in chain.heads:
            manifest = await load_manifest(self._cold, head.path)
            view.add(manifest)
            named |= {flush.notes for flush in manifest.flushes}
            for incarnation, _ in manifest.removed_streams:
                blobs.pop(incarnation, None)
            blobs.update({row.incarnation: row.blob for row in manifest.streams})
        named |= view.segments.keys()  # what a manifest says is replaced is kept by the catalog, for as long as it is
        named |= {f"snapshots/{blob.decode()}" for blob in blobs.values() if blob is not None}
        for head in (*chain.beyond, *chain.passed):
            named |= _all_named(await load_manifest(self._cold, head.path))
        return named


def _is_overtaken(head: ManifestHead, chain: Chain) -> bool:
    if any(other.previous == head.digest for other in (*chain.beyond, *chain.passed) if head.digest):
        return False  # another history goes on from there
    return head.is_full or any(
        other.first == head.first
        and other.previous == head.previous
        and other.epoch >= head.epoch
        and other.through >= head.through
        for other in chain.heads
    )


def _all_named(manifest: Manifest) -> set[str]:
    named = {flush.notes for flush in manifest.flushes}
    named |= {segment.path for flush in manifest.flushes for segment in flush.segments}
    named |= {segment.path for one in manifest.replacements for segment in one.segments}
    return named | {f"snapshots/{row.blob.decode()}" for row in manifest.streams if row.blob is not None}
