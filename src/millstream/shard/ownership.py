"""Owning the object store: only the owner of a shard's part of it writes there and deletes there.

Ownership is an epoch (`tiers/owners.py`). Whoever begins to lead a shard takes the next one, and says so in its log
first (`StoreClaimed`); so a log knows the last epoch that it was part of. A start finds in the store

- that very epoch, or none behind it: the store is ours, and goes on with us;
- a later one: somebody else has owned it since, from another copy of this data or after a `restore`. What they wrote is
  not in this log, so this one is refused;
- manifests of our own epoch that reach beyond our log: this is an older copy of the data. Refused as well;
- nothing at all although the log knows of an epoch: the store is lost, or it is the wrong one. Refused.

A store that does not answer cannot be asked: the log goes on, and notes where it stood (`go_on_unasked`). What it takes
from there on may differ from what another copy of it took meanwhile, so positions are compared with that place.

A running owner looks before it seals a flush and before it deletes anything. One that was replaced stops: it accepts
no writes, since nothing it accepts could reach the store. A manifest that it has put just then carries its old epoch,
and loses against the new owner's (`manifests.find_chain`).
"""

from __future__ import annotations

import asyncio
import logging
import os
import socket
from datetime import UTC, datetime
from typing import Final

from millstream.clock import Clock
from millstream.errors import Conflict, Corrupt, MillstreamError, NotLeader, Unavailable
from millstream.shard.committer import Committer
from millstream.streams.machine import StateMachine
from millstream.streams.records import StoreClaimed
from millstream.tiers.manifests import read_manifest
from millstream.tiers.objects import Objects
from millstream.tiers.owners import Owner, become_owner, epochs, newest_owner, owner_path, presumed_owner
from millstream.tiers.stored_names import list_ours
from millstream.units import Position

logger = logging.getLogger("millstream.store")

RESTORE_HINT: Final = (
    "if the other one is gone for good, rebuild an empty data directory with `millstream restore`; to go on with this"
    " data directory all the same, and lose what only the store has, start once with --set cold.take_over=true"
)

WRONG_STORE_HINT: Final = (
    "correct cold.path, the bucket or the endpoint; if the store is lost for good, start once with"
    " --set cold.take_over=true: then what the log still holds is kept"
)


class StoreRefused(Conflict):
    """The object store is not this one's to write to."""

    code = "store_refused"


class Ownership:
    def __init__(
        self,
        objects: Objects,
        machine: StateMachine,
        committer: Committer,
        clock: Clock,
        shard: int = 0,
        *,
        may_take_over: bool = False,
    ) -> None:
        self._objects = objects
        self._machine = machine
        self._committer = committer
        self._clock = clock
        self._shard = shard
        self._may_take_over = may_take_over
        self._lock = asyncio.Lock()
        # The claim that is in the log and not in the store yet.
        self._pending: Owner | None = None
        # Whether the log says how it goes on: with a claim, or unasked. Until then only `Shard.lead` may claim: a claim
        # that a flush announced at the same time could be followed in the log by the note that names the one before it.
        self.is_settled = False
        # How often this one has begun not to lead: what was asked before that says nothing about now.
        self._resigned = 0
        # A claim that a restore has made for this shard, if that is not in the log.
        self.granted: StoreClaimed | None = None
        self.owner: Owner | None = None
        # Why the store is not ours, and the last claim in the log when that was found.
        self._refused: tuple[MillstreamError, StoreClaimed | None] | None = None

    @property
    def epoch(self) -> int:
        return self.owner.epoch if self.owner is not None else 0

    @property
    def since(self) -> int:
        """Manifests of earlier epochs than this are another's history."""
        return self.owner.since if self.owner is not None else 0

    @property
    def refusal(self) -> MillstreamError | None:
        """Why the store is not ours; None while it is, or nobody could be asked yet.

        A later claim in the log is that of another node that leads this very shard: it has asked anew.
        """
        if self._refused is None or self._refused[1] != self._machine.store_claim:
            return None
        return self._refused[0]

    def resign(self) -> None:
        """Another node leads the shard, and owns its part of the store."""
        self.owner = self._pending = None
        self.is_settled = False
        self._resigned += 1

    async def claim(self) -> None:
        """Become the owner, or find that the store is not ours; raises `Unavailable` while it cannot be asked."""
        async with self._lock:
            if self.owner is not None:
                return
            resigned = self._resigned
            try:
                owner = await self._claim()
            except StoreRefused as refusal:
                self._refused = refusal, self._machine.store_claim
                raise
            if resigned != self._resigned:
                raise NotLeader("this node has handed the shard over; its claim of the object store is void")
            self.owner, self._pending, self._refused = owner, None, None
            self.is_settled = True

    async def claim_late(self) -> None:
        """The same while writes are accepted already: they end if the store is not ours."""
        try:
            await self.claim()
        except StoreRefused as refusal:
            raise self._stop(refusal.message) from None

    async def go_on_unasked(self) -> None:
        """Note in the log, before anything else is accepted, that it goes on without an answer of the store."""
        known = self._known()
        if known is not None and self._machine.store_unasked_at is None:
            await self._committer.commit(known)
        self.is_settled = True

    async def check(self) -> None:
        """Make sure that the store is still ours, before something is written that counts, or deleted."""
        if not self.is_settled:
            raise NotLeader("this node has not begun to lead the shard")
        if self.owner is None:
            await self.claim_late()
        owner = self.owner
        assert owner is not None
        known = await epochs(self._objects, self._shard)
        newest = await presumed_owner(self._objects, self._shard) if known and known[-1] > owner.epoch else None
        if self.owner is not owner:
            raise NotLeader("this node has handed the shard over meanwhile")
        if newest is not None:
            raise self._lost(f"{described(newest)} has taken over the object store")
        if not known or known[-1] < owner.epoch:
            raise self._lost(f"the object store no longer has {owner_path(self._shard, owner.epoch)}")

    def _lost(self, reason: str) -> Unavailable:
        self.owner = None
        return self._stop(reason)

    def _stop(self, reason: str) -> Unavailable:
        """Accept nothing more. What was accepted and not flushed is in the log, and stays there."""
        refusal = Unavailable(
            f"{reason}; this server writes nothing more, since none of it could reach the store",
            code="store_taken_over",
            hint='what is not flushed is in its log: see "When the store is refused" in docs/operations.md',
            retry_after_seconds=30,
        )
        self._refused = refusal, self._machine.store_claim
        logger.critical("shard %d: %s", self._shard, refusal.message)
        self._committer.refuse(refusal)
        self._committer.on_failure()
        return refusal

    # -- claiming ----------------------------------------------------------------------------------------------

    async def _claim(self) -> Owner:
        newest, damage = await self._newest()
        known = self._known()
        unasked_at = self._machine.store_unasked_at
        end = self._committer.applied_position if unasked_at is None else unasked_at
        reason = damage or await why_refused(self._objects, self._shard, newest, known, end)
        if reason is not None and not self._may_take_over:
            is_other_store = known is not None and (newest is None or newest.store != known.store)
            raise StoreRefused(reason, hint=WRONG_STORE_HINT if is_other_store else RESTORE_HINT)
        if reason is not None:
            logger.warning("shard %d: taking over the object store although %s", self._shard, reason)
        pending = self._pending
        is_stale = newest is not None and pending is not None and newest.epoch >= pending.epoch
        if pending is None or is_stale or unasked_at is not None:
            self._pending = pending = await self._announce(newest, known, is_forced=reason is not None)
        got = await become_owner(self._objects, self._shard, pending)
        if got.claim != pending.claim:
            self._pending = None
            raise StoreRefused(f"{described(got)} has taken over the object store just now", hint=RESTORE_HINT)
        # What the owner before us wrote while we were claiming is there by now; later it writes nothing that counts.
        late = (
            None
            if reason is not None
            else await _manifests_ahead(self._objects, self._shard, end, _epoch(newest, known))
        )
        if late is not None:
            await self._withdraw(known)
            raise StoreRefused(late, hint=RESTORE_HINT)
        return got

    async def _newest(self) -> tuple[Owner | None, str | None]:
        """The store's owner, and what is wrong with its object if that is damaged and may be passed over."""
        try:
            return await newest_owner(self._objects, self._shard), None
        except Corrupt as error:
            if not self._may_take_over:
                raise StoreRefused(error.message, hint=error.hint) from None
            return await presumed_owner(self._objects, self._shard), error.message

    async def _withdraw(self, known: StoreClaimed | None) -> None:
        """Put the claim before ours into the log again. Ours is in the store and cannot be taken back: the next start
        would take it for a sign that what the owner before us wrote does not count."""
        self._pending = None
        former = known or StoreClaimed("none", 0, 0, "", self._clock.now_ms())
        await self._committer.commit(former)

    def _known(self) -> StoreClaimed | None:
        """The last claim that this log was part of."""
        logged, granted = self._machine.store_claim, self.granted
        if logged is None or granted is None:
            return logged or granted
        return granted if granted.epoch > logged.epoch else logged

    async def _announce(self, newest: Owner | None, known: StoreClaimed | None, *, is_forced: bool) -> Owner:
        """Put the next claim into the log, so that whoever has this log knows that it was ours."""
        epoch = max(newest.epoch if newest is not None else 0, known.epoch if known is not None else 0) + 1
        store = (newest.store if newest is not None else "") or (known.store if known is not None else "")
        since = epoch if is_forced else known.since if known is not None else 0
        owner = Owner(
            store or self._clock.random_bytes(16).hex(),
            epoch,
            since,
            self._clock.random_bytes(16).hex(),
            f"{socket.gethostname()}, process {os.getpid()}",
            self._clock.now_ms(),
        )
        record = StoreClaimed(owner.store, owner.epoch, owner.since, owner.claim, owner.at_ms)
        await self._committer.commit(record)
        return owner


async def why_refused(
    objects: Objects, shard: int, newest: Owner | None, known: StoreClaimed | None, end: Position
) -> str | None:
    """Why a log may not go on with the store: `known` is its last claim, and `end` the end of it that counts."""
    if known is not None or await _has_manifests(objects, shard):
        reason = _foreign(newest, known)
        if reason is not None:
            return reason
    # Otherwise whoever it was has never flushed anything: there is nothing to lose, nor to restore.
    return await _manifests_ahead(objects, shard, end, _epoch(newest, known))


def _epoch(newest: Owner | None, known: StoreClaimed | None) -> int:
    """Our last epoch; a claim of ours that never reached the store has replaced nobody."""
    return min(known.epoch if known is not None else 0, newest.epoch if newest is not None else 0)


async def _has_manifests(objects: Objects, shard: int) -> bool:
    async for _ in list_ours(objects, f"manifests/{shard:04d}/"):
        return True
    return False


async def _manifests_ahead(objects: Objects, shard: int, end: Position, epoch: int) -> str | None:
    """Whether the store holds flushes that a log, of which `end` is the end that counts, knows nothing of.

    A flush reaches at most as far as the log it is made from. Those of epochs before `epoch`, our last one, are not
    meant: they were written too late, by an owner that had been replaced.
    """
    async for entry, _, position in list_ours(objects, f"manifests/{shard:04d}/"):
        if position <= end:
            continue
        _, head = read_manifest(await objects.get(entry.path), entry.path)
        if head.epoch >= epoch:
            return (
                f"the object store goes on to position {head.through:,} ({entry.path}), and this data directory"
                f" ends at {end:,}: it is an older copy, or another server's"
            )
    return None


async def take_over(objects: Objects, shard: int, clock: Clock, *, breaks_history: bool) -> StoreClaimed:
    """Become the owner for a data directory that was just restored: whoever owned the store stops.

    With `breaks_history` what earlier owners wrote is left alone for good: not all of it was restored. The same if the
    last one's object is damaged.
    """
    while True:
        newest = await presumed_owner(objects, shard)
        epoch = newest.epoch + 1 if newest is not None else 1
        owner = Owner(
            (newest.store if newest is not None else "") or clock.random_bytes(16).hex(),
            epoch,
            epoch if breaks_history else newest.since if newest is not None else 0,
            clock.random_bytes(16).hex(),
            f"`millstream restore` on {socket.gethostname()}",
            clock.now_ms(),
        )
        if (await become_owner(objects, shard, owner)).claim == owner.claim:
            return StoreClaimed(owner.store, owner.epoch, owner.since, owner.claim, owner.at_ms)


def _foreign(newest: Owner | None, known: StoreClaimed | None) -> str | None:
    """Why the store's owner is not one that this log knows."""
    if newest is None:
        if known is None:
            return None
        return (
            f"the object store has no owner, and this data directory belongs to store {known.store}: the store is lost,"
            " or cold.path (or the bucket) names another place"
        )
    if known is None:
        return f"the object store belongs to {described(newest)}, and this data directory does not know of that"
    if newest.store != known.store:
        return f"this is store {newest.store} of {described(newest)}; this data directory belongs to {known.store}"
    if newest.epoch > known.epoch or (newest.epoch == known.epoch and newest.claim != known.claim):
        return f"{described(newest)} has owned the object store since this data directory did (epoch {known.epoch})"
    return None


def described(owner: Owner) -> str:
    if owner.at_ms == 0:  # one whose object is damaged
        return f"{owner.who}, epoch {owner.epoch},"
    since = datetime.fromtimestamp(owner.at_ms / 1000, UTC).isoformat(timespec="seconds")
    return f"{owner.who} (epoch {owner.epoch}, since {since})"
