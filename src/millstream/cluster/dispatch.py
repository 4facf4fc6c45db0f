"""Dispatch of requests in a cluster: which shard a request belongs to, and which node answers it.

Writes go to the shard's leader: any other node redirects them (307) or forwards them. Reads are answered by the node
they arrive at, from what it has applied; if this node does not have the data (yet), the request goes to the leader. The
header `Millstream-Role` says whether the leader answered; an answer of the leader is linearizable. One gate for all
shards judges every request first. A forwarded request carries its token, and the next node judges it again.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Final

import msgspec

from millstream.access.forward_marks import MARK, make_mark
from millstream.cluster.forwarding import Forwarder
from millstream.cluster.local_shard import AllReaders, LocalShard
from millstream.cluster.membership import Membership
from millstream.cluster.placement import shard_of
from millstream.cluster.replica import Replica
from millstream.errors import Conflict, Gone, InvalidRequest, MillstreamError, NotFound, NotLeader, Unavailable
from millstream.pending import Pending
from millstream.protocol.globs import literal_prefix
from millstream.protocol.keys import decode_segment, parse_v1_path
from millstream.protocol.offsets import parse_offset
from millstream.server.api.background import in_background
from millstream.server.api.compaction_api import bucket_of_proposal
from millstream.server.api.routes import Kind, Route
from millstream.server.api.stream_api import source_key, start_token
from millstream.server.http.application import LiveReads
from millstream.server.http.error_map import status_of
from millstream.server.http.limits import ReadLimits
from millstream.server.http.messages import Answer, Request, Response, Upload, parse_query
from millstream.streams.subscriptions import parse_config

_SUBSCRIPTIONS: Final = b"/v1/stream/__ds/subscriptions/"
_KEYS: Final = b"/v1/stream/__ds/jwks.json"
_READS: Final = frozenset({"GET", "HEAD"})
_ROLE: Final = {True: b"millstream-role: leader\r\n", False: b"millstream-role: follower\r\n"}


class ClusterDispatch:
    """The backend of a node's front. `address_of` gives the client's address as far as this node can determine it."""

    def __init__(
        self,
        shards: Sequence[LocalShard],
        membership: Membership,
        forwarder: Forwarder | None,
        address_of: Callable[[Request], str],
    ) -> None:
        self._shards = shards
        self._membership = membership
        self._forwarder = forwarder
        self._address_of = address_of
        self._readers = AllReaders(shards)
        # Read limits that were set by a reload since the start.
        self.read_limits: ReadLimits | None = None

    @property
    def live_reads(self) -> LiveReads:
        return self._readers

    @property
    def methods(self) -> dict[Kind, list[str]]:
        return self._shards[0].handlers.methods

    def set_read_limits(self, limits: ReadLimits) -> None:
        self.read_limits = limits
        for local in self._shards:
            local.handlers.set_read_limits(limits)

    def begin_upload(self) -> tuple[Upload, int]:
        return self._shards[0].handlers.begin_upload()

    def close(self) -> None:
        if self._forwarder is not None:
            self._forwarder.close()

    def handle(self, request: Request, route: Route) -> Answer:
        if request.path == _KEYS and request.method == "GET":
            return self._keys()
        local = self._shard_of(request, route)
        if not local.is_open:
            raise Unavailable("this node is restoring its state", hint="ask another node, or try again")
        if request.method in _READS:
            return self._read(request, route, local)
        if local.replica.is_leading:
            self._check_fork(request, local)
            return local.handlers.handle(request, route)
        if request.method == "POST" and route.kind is Kind.STREAM and local.replica.may_append:
            return self._append_without_lease(request, route, local)
        return self._send_to_leader(request, local)

    def _keys(self) -> Response:
        """The public keys for webhook signatures. Every shard has its own key, and a receiver gets all of them."""
        keys = [
            local.handlers.subscriptions.wakes.signer.jwk
            for local in self._shards
            if local.replica.shard.machine.secrets is not None
        ]
        fields = b"content-type: application/jwk-set+json\r\ncache-control: public, max-age=300\r\n"
        return Response(200, fields, msgspec.json.encode({"keys": keys}))

    # -- which shard -------------------------------------------------------------------------------------------

    def _shard_of(self, request: Request, route: Route) -> LocalShard:
        if len(self._shards) == 1:
            return self._shards[0]
        if route.kind is Kind.CONTROL:
            return self._of_subscription(request)
        bucket: str | None = route.bucket
        if route.kind is Kind.COMPACTIONS:
            bucket = bucket_of_proposal(request)
        return self._of_bucket(bucket) if bucket else self._shards[0]

    def _of_bucket(self, bucket: str) -> LocalShard:
        return self._shards[shard_of(bucket, len(self._shards))]

    def _of_subscription(self, request: Request) -> LocalShard:
        """A subscription lives in the shard of its streams, which must all be in one shard."""
        if not request.path.startswith(_SUBSCRIPTIONS):
            return self._shards[0]
        name = decode_segment(request.path.removeprefix(_SUBSCRIPTIONS).partition(b"/")[0])
        for local in self._shards:
            if name in local.replica.shard.machine.subscriptions.by_id:
                return local
        if request.method != "PUT":
            return self._shards[0]
        try:
            config = parse_config(msgspec.json.decode(request.body) if request.body else {})
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            return self._shards[0]  # the handlers refuse it, in every shard alike
        shards = {shard_of(parse_v1_path(path).bucket, len(self._shards)) for path in config.streams}
        if config.wake_stream is not None:
            shards.add(shard_of(parse_v1_path(config.wake_stream).bucket, len(self._shards)))
        if config.pattern is not None:
            bucket, slash, _ = literal_prefix(config.pattern).partition("/")
            if not slash:
                raise _across_shards("a pattern must name its bucket, as in bucket/*")
            shards.add(shard_of(bucket, len(self._shards)))
        if len(shards) > 1:
            raise _across_shards("its streams and its wake stream lie in buckets of different shards")
        return self._shards[shards.pop() if shards else 0]

    def _check_fork(self, request: Request, local: LocalShard) -> None:
        source = request.header(b"stream-forked-from") if len(self._shards) > 1 else None
        if source is not None and request.method == "PUT" and self._of_bucket(source_key(source).bucket) is not local:
            raise Conflict(
                "a fork and its source must live in one shard, and these buckets do not",
                code="fork_across_shards",
                hint="fork within the bucket, or copy the stream",
            )

    # -- which node --------------------------------------------------------------------------------------------

    def _read(self, request: Request, route: Route, local: LocalShard) -> Answer:
        replica = local.replica
        if route.document is not None and not replica.is_leading and not self._has_document(request, replica, route):
            return self._send_to_leader(request, local)
        if not request.query or not self._is_reader_ahead(request, replica, route):
            return self._read_here(request, route, local)
        if replica.is_leading:
            # A follower may receive a batch before the leader does: wait until the leader has it too.
            arrived = replica.shard.committer.after_durable(None)
            return arrived.then(lambda _: self._read_here(request, route, local))
        return self._send_to_leader(request, local)

    def _read_here(self, request: Request, route: Route, local: LocalShard) -> Answer:
        """Read from what this node has applied. A follower asks the leader before it answers that something does not
        exist."""
        replica = local.replica
        term = self._membership.generation(replica.number) if replica.is_leading else 0
        request.role = partial(self._role, replica, term)
        if term:
            return local.handlers.handle(request, route)

        def unless_missing(outcome: Response | MillstreamError) -> Answer | MillstreamError:
            return self._send_to_leader(request, local) if isinstance(outcome, NotFound | Gone) else outcome

        return _answer_of(local, request, route).then_either(unless_missing)

    def _role(self, replica: Replica, term: int) -> bytes:
        """The role header. The leader's answers are linearizable: its lease was valid when the data was read and still
        is, so no other node has written in between."""
        is_leader = term > 0 and replica.is_leading and self._membership.generation(replica.number) == term
        return _ROLE[is_leader]

    @staticmethod
    def _append_without_lease(request: Request, route: Route, local: LocalShard) -> Answer:
        """Append while the lease may have expired: the log alone decides whether the append counts. A refusal by this
        node rests on state that may be out of date without the lease, so the client is told that there is no leader
        instead."""

        def without_refusal(outcome: Response | MillstreamError) -> Response | MillstreamError:
            is_refusal = isinstance(outcome, MillstreamError) and 400 <= status_of(outcome) < 500
            return _no_leader(local.replica.number) if is_refusal and not local.replica.is_leading else outcome

        return _answer_of(local, request, route).then_either(without_refusal)

    @staticmethod
    def _has_document(request: Request, replica: Replica, route: Route) -> bool:
        """Whether the document exists here. If not, it is empty or its first reader creates it, and the leader must
        answer."""
        document = route.document
        assert document is not None
        try:
            name = parse_query(request.query).get("awareness")
            replica.shard.get(document.key if name is None else document.awareness_key(name))
        except InvalidRequest:
            return True  # the handler refuses the path
        except MillstreamError:
            return False
        return True

    @staticmethod
    def _is_reader_ahead(request: Request, replica: Replica, route: Route) -> bool:
        """Whether the reader's offset is ahead of this node: it has read from another node, which had more."""
        try:
            query = parse_query(request.query)
            key = route.key
            if key is not None and (route.kind is Kind.STREAM or (route.document and "awareness" not in query)):
                token = start_token(request, query) or "-1"
                stream = replica.shard.namespace.find(key)
                return stream is not None and token not in ("-1", "now") and parse_offset(token) > stream.tail
            if route.kind is Kind.FEED:
                token = (
                    (request.header(b"last-event-id") or query.get("after", ""))
                    if "live" in query
                    else query.get("after", "")
                )
                position = token.rpartition(".")[2]
                return position.isdigit() and int(position) > replica.shard.feed.latest
        except InvalidRequest:
            pass  # the handler refuses the offset
        return False

    def _send_to_leader(self, request: Request, local: LocalShard) -> Answer:
        """Redirect the client to the leader, or forward the request to it."""
        number = local.replica.number
        lease = self._membership.view.leases.get(number)
        # A forwarded answer is read completely before it is sent on, so live reads and HEAD requests are redirected.
        can_be_forwarded = request.upload is None and request.method != "HEAD" and b"live=" not in request.query
        request.role = None  # the leader sets its own role header
        if request.upload is not None:
            request.upload.discard()
        if lease is None or lease.released or lease.node == self._membership.heartbeat.node or MARK in request.headers:
            raise _no_leader(number)
        if self._forwarder is not None and can_be_forwarded:
            return in_background(self._forwarder.forward(request, lease.advertise, self._mark_for(request)))
        target = request.path + (b"?" + request.query if request.query else b"")
        fields = b"location: %b%b\r\ncache-control: no-store\r\n" % (lease.advertise.encode(), target)
        return Response(307, fields)

    def _mark_for(self, request: Request) -> bytes:
        """The mark for a forwarded request: the client's address, signed, as far as this node can determine it."""
        key = self._shards[0].replica.shard.token_key()
        return make_mark(key, self._membership.heartbeat.node, self._address_of(request))


def with_role(request: Request, response: Response) -> Response:
    """A policy: adds the role header to a cluster's answers."""
    if request.role is None or response.status == 304:
        return response
    return Response(response.status, response.fields + request.role(), response.body, length=response.length)


def _answer_of(local: LocalShard, request: Request, route: Route) -> Pending[Response]:
    """The outcome of the handlers, with raised errors as outcomes."""
    try:
        answer = local.handlers.handle(request, route)
    except MillstreamError as error:
        return Pending.settled(error)
    return answer if isinstance(answer, Pending) else Pending.settled(answer)


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
