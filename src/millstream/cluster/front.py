"""Requests in a cluster: which shard one belongs to, and which node answers it.

Writes go to the shard's leader: elsewhere they are answered 307 with its address, or passed on. Reads are answered
where they arrive, from what is committed there; what this node does not have (yet), the leader is asked for. An answer
says in `Millstream-Role` whether it is the leader's, and then it is linearizable. The gate stands before all of this,
one for all shards; a request that is passed on takes its token along and is judged again where it arrives.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Final

import msgspec

from millstream.access.forward_marks import MARK, make_mark
from millstream.cluster.forwarding import Forwarder
from millstream.cluster.membership import Membership
from millstream.cluster.placement import shard_of
from millstream.cluster.replica import Replica
from millstream.errors import Conflict, InvalidRequest, MillstreamError, NotLeader, Unavailable
from millstream.protocol.globs import literal_prefix
from millstream.protocol.keys import StreamKey, decode_segment, parse_v1_path
from millstream.protocol.offsets import parse_offset
from millstream.server.api.app import Application, Route, route, target_of
from millstream.server.api.compaction_api import bucket_of_proposal
from millstream.server.api.examples import EXAMPLES_ROOT
from millstream.server.api.front import Front
from millstream.server.api.health_api import HealthApi
from millstream.server.api.later import reply_later
from millstream.server.api.stream_api import source_key, start_token
from millstream.server.api.url_token_api import URL_TOKENS
from millstream.server.api.yjs_api import YjsApi
from millstream.server.http.application import LiveReads
from millstream.server.http.error_map import defect_response, error_response
from millstream.server.http.limits import ReadLimits
from millstream.server.http.messages import Request, Response, Upload, parse_query
from millstream.server.http.metrics import Metrics
from millstream.streams.subscriptions import Subscription, parse_config
from millstream.yjs.names import YJS_ROOT, Document

_SUBSCRIPTIONS: Final = b"/v1/stream/__ds/subscriptions/"
_KEYS: Final = b"/v1/stream/__ds/jwks.json"
_READS: Final = frozenset({"GET", "HEAD", "OPTIONS"})
_OF_NODES: Final = (b"/cluster/", b"/readyz/", b"/healthz", b"/metrics")
_ROLE: Final = {True: b"millstream-role: leader\r\n", False: b"millstream-role: follower\r\n"}


class Slot:
    """A shard at this node: the replica, and the handlers over it. Both are replaced when it is restored."""

    def __init__(self, replica: Replica, app: Application) -> None:
        self.replica = replica
        self.app = app
        self.is_open = True


class AllReaders:
    """The live readers of every shard."""

    def __init__(self, slots: Sequence[Slot]) -> None:
        self._slots = slots

    def end_all(self) -> None:
        for slot in self._slots:
            slot.app.readers.end_all()


class AllSubscriptions(Mapping[str, Subscription]):
    """The subscriptions of every shard, by their names."""

    def __init__(self, slots: Sequence[Slot]) -> None:
        self._slots = slots

    def __getitem__(self, name: str) -> Subscription:
        for slot in self._slots:
            found = slot.replica.shard.machine.subscriptions.by_id.get(name)
            if found is not None:
                return found
        raise KeyError(name)

    def __iter__(self) -> Iterator[str]:
        return (name for slot in self._slots for name in slot.replica.shard.machine.subscriptions.by_id)

    def __len__(self) -> int:
        return sum(len(slot.replica.shard.machine.subscriptions.by_id) for slot in self._slots)


class ClusterApplication(Front):
    def __init__(
        self,
        slots: Sequence[Slot],
        membership: Membership,
        admin: Callable[[Request], bool],
        health: HealthApi,
        metrics: Metrics,
        limits: ReadLimits,
        forwarder: Forwarder | None,
    ) -> None:
        super().__init__(target_of, metrics, health)
        self._slots = slots
        self._membership = membership
        self._admin = admin
        self._forwarder = forwarder
        self._readers = AllReaders(slots)
        self.read_limits = limits

    @property
    def live_reads(self) -> LiveReads:
        return self._readers

    def set_read_limits(self, limits: ReadLimits) -> None:
        self.read_limits = limits
        for slot in self._slots:
            slot.app.set_read_limits(limits)

    def close(self) -> None:
        if self._forwarder is not None:
            self._forwarder.close()

    def upload_for(self, method: str, target: bytes, body_bytes_max: int) -> tuple[Upload | None, int]:
        return self._slots[0].app.upload_for(method, target, body_bytes_max)

    def handle(self, request: Request) -> None:
        if request.path.startswith(YJS_ROOT):
            YjsApi.adopt(request)
        try:
            if self.examples is not None and request.path.startswith(EXAMPLES_ROOT):
                self.examples.serve(request)
                return
            if self.gate is not None:
                self.gate.admit(request, target_of)
            if request.path == _KEYS and request.method == "GET":
                self._keys(request)
                return
            found = route(request.path)
            request.series = self.metrics.series(request.method, found.kind)
            if self.shows_console(request, found.kind) or (request.path.startswith(_OF_NODES) and self._admin(request)):
                return
            if found.kind == URL_TOKENS:  # no node need be asked to sign
                self._slots[0].app.handle(request)
                return
            slot = self._slot_of(request, found)
            if not slot.is_open:
                raise Unavailable("this node is restoring its state", hint="ask another node, or try again")
            if request.method in _READS:
                self._read(request, slot, found)
            elif slot.replica.is_leading:
                self._check_fork(request, slot)
                slot.app.handle(request)
            elif request.method == "POST" and found.kind == "stream" and slot.replica.may_append:
                self._append_without_lease(request, slot)
            else:
                self._elsewhere(request, slot)
        except MillstreamError as error:
            self._discard(request)
            request.reply(error_response(error))
        except Exception:  # a defect is the misfortune of one request, not of its connection or the node
            self._discard(request)
            request.reply(defect_response(request))

    def _keys(self, request: Request) -> None:
        """The keys that sign webhooks: every shard has its own, and a receiver asks for all of them."""
        keys = [
            slot.app.subscriptions.wakes.signer.jwk
            for slot in self._slots
            if slot.replica.shard.machine.secrets is not None
        ]
        fields = b"content-type: application/jwk-set+json\r\ncache-control: public, max-age=300\r\n"
        request.reply(Response(200, fields, msgspec.json.encode({"keys": keys})))

    # -- which shard -------------------------------------------------------------------------------------------

    def _slot_of(self, request: Request, found: Route) -> Slot:
        if len(self._slots) == 1:
            return self._slots[0]
        if found.key is not None:
            return self._of_bucket(found.key.bucket)
        if found.kind == "control":
            return self._of_subscription(request)
        if found.kind == "compactions":
            bucket = bucket_of_proposal(request)
            return self._of_bucket(bucket) if bucket is not None else self._slots[0]
        owner = found.arguments[0] if found.arguments else None
        if isinstance(owner, Document):
            owner = owner.key
        if isinstance(owner, StreamKey):
            return self._of_bucket(owner.bucket)
        return self._of_bucket(owner) if isinstance(owner, str) else self._slots[0]

    def _of_bucket(self, bucket: str) -> Slot:
        return self._slots[shard_of(bucket, len(self._slots))]

    def _of_subscription(self, request: Request) -> Slot:
        """A subscription lives where its streams do; they must all live in one shard."""
        if not request.path.startswith(_SUBSCRIPTIONS):
            return self._slots[0]
        name = decode_segment(request.path.removeprefix(_SUBSCRIPTIONS).partition(b"/")[0])
        for slot in self._slots:
            if name in slot.replica.shard.machine.subscriptions.by_id:
                return slot
        if request.method != "PUT":
            return self._slots[0]
        try:
            config = parse_config(msgspec.json.decode(request.body) if request.body else {})
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            return self._slots[0]  # it will be refused there, as anywhere
        shards = {shard_of(parse_v1_path(path).bucket, len(self._slots)) for path in config.streams}
        if config.wake_stream is not None:
            shards.add(shard_of(parse_v1_path(config.wake_stream).bucket, len(self._slots)))
        if config.pattern is not None:
            bucket, slash, _ = literal_prefix(config.pattern).partition("/")
            if not slash:
                raise _across_shards("a pattern must name its bucket, as in bucket/*")
            shards.add(shard_of(bucket, len(self._slots)))
        if len(shards) > 1:
            raise _across_shards("its streams and its wake stream lie in buckets of different shards")
        return self._slots[shards.pop() if shards else 0]

    def _check_fork(self, request: Request, slot: Slot) -> None:
        source = request.header(b"stream-forked-from") if len(self._slots) > 1 else None
        if source is not None and request.method == "PUT" and self._of_bucket(source_key(source).bucket) is not slot:
            raise Conflict(
                "a fork and its source must live in one shard, and these buckets do not",
                code="fork_across_shards",
                hint="fork within the bucket, or copy the stream",
            )

    # -- which node --------------------------------------------------------------------------------------------

    def _read(self, request: Request, slot: Slot, found: Route) -> None:
        replica = slot.replica
        if found.kind == "yjs" and not replica.is_leading and not self._has_document(request, replica, found):
            self._elsewhere(request, slot)
        elif not request.query or not self._is_beyond(request, replica, found):
            self._read_here(request, slot)
        elif replica.is_leading:
            # A follower may hear of a batch before its own leader does: that one is still on its way to us.
            replica.shard.committer.settle(lambda outcome: self._read_here(request, slot))
        else:
            self._elsewhere(request, slot)

    def _read_here(self, request: Request, slot: Slot) -> None:
        replica, reply = slot.replica, request.reply
        term = self._membership.generation(replica.number) if replica.is_leading else 0

        def answer(response: Response) -> None:
            # The lease was good when this was read and is now: nobody else has written in between.
            is_leader = term > 0 and replica.is_leading and self._membership.generation(replica.number) == term
            if response.status in (404, 410) and not term and request.method != "OPTIONS":
                request.reply = reply
                self._try_elsewhere(request, slot)
                return
            if response.status != 304:
                response = Response(
                    response.status, response.fields + _ROLE[is_leader], response.body, length=response.length
                )
            reply(response)

        request.reply = answer
        slot.app.handle(request)

    @staticmethod
    def _append_without_lease(request: Request, slot: Slot) -> None:
        """The log alone decides whether an append counts. A refusal rests on what this node believes, and without the
        lease that may be out of date: it is not told."""
        reply = request.reply

        def answer(response: Response) -> None:
            if 400 <= response.status < 500 and not slot.replica.is_leading:
                response = error_response(_no_leader(slot.replica.number))
            reply(response)

        request.reply = answer
        slot.app.handle(request)

    def _try_elsewhere(self, request: Request, slot: Slot) -> None:
        try:
            self._elsewhere(request, slot)
        except MillstreamError as error:
            request.reply(error_response(error))

    @staticmethod
    def _has_document(request: Request, replica: Replica, found: Route) -> bool:
        """Whether what is read exists here: what does not is empty or made by its first reader, where the leader is."""
        document: Document = found.arguments[0]
        try:
            name = parse_query(request.query).get("awareness")
            replica.shard.get(document.key if name is None else document.awareness_key(name))
        except InvalidRequest:
            return True  # it will be refused as such
        except MillstreamError:
            return request.method == "OPTIONS"
        return True

    @staticmethod
    def _is_beyond(request: Request, replica: Replica, found: Route) -> bool:
        """Whether a reader is ahead of this node: it has been elsewhere, and must not be set back."""
        try:
            query = parse_query(request.query)
            key = found.arguments[0].key if found.kind == "yjs" and "awareness" not in query else found.key
            if key is not None:
                token = start_token(request, query) or "-1"
                stream = replica.shard.namespace.find(key)
                return stream is not None and token not in ("-1", "now") and parse_offset(token) > stream.tail
            if found.kind == "feed":
                token = (
                    (request.header(b"last-event-id") or query.get("after", ""))
                    if "live" in query
                    else query.get("after", "")
                )
                position = token.rpartition(".")[2]
                return position.isdigit() and int(position) > replica.shard.feed.latest
        except InvalidRequest:
            pass  # it will be refused as such
        return False

    def _elsewhere(self, request: Request, slot: Slot) -> None:
        """Send the client, or the request, to the node that leads."""
        number = slot.replica.number
        lease = self._membership.view.leases.get(number)
        # An answer that is passed back is whole: neither a live read's, nor one whose body is left out.
        can_be_forwarded = request.upload is None and request.method != "HEAD" and b"live=" not in request.query
        self._discard(request)
        if lease is None or lease.released or lease.node == self._membership.sign.node or MARK in request.headers:
            raise _no_leader(number)
        if self._forwarder is not None and can_be_forwarded:
            work = self._forwarder.forward(request, lease.advertise, self._mark_for(request))
            reply_later(request, work, lambda response: response)
            return
        target = request.path + (b"?" + request.query if request.query else b"")
        fields = b"location: %b%b\r\ncache-control: no-store\r\n" % (lease.advertise.encode(), target)
        request.reply(Response(307, fields))

    def _mark_for(self, request: Request) -> bytes:
        """What the next node is told of a request that is passed on: whose it is, as far as this one can tell."""
        address = self.gate.client_address(request) if self.gate is not None else request.address
        return make_mark(self._slots[0].replica.shard.token_key(), self._membership.sign.node, address)

    @staticmethod
    def _discard(request: Request) -> None:
        if request.upload is not None:
            request.upload.discard()


def _no_leader(shard: int) -> NotLeader:
    return NotLeader(
        f"shard {shard} has no leader at the moment; nothing was written",
        code="no_leader",
        hint="one is elected within seconds; try again",
    )


def _across_shards(reason: str) -> InvalidRequest:
    return InvalidRequest(
        f"a subscription lives in one shard: {reason}",
        code="SUBSCRIPTION_ACROSS_SHARDS",
        hint="make one subscription for each bucket",
    )
