"""The gate: authenticates a request, checks its scopes, and enforces rates.

It comes before the handlers, unless no token is needed and nothing is limited. It refuses by raising, before anything
is looked up, so a refusal reveals nothing about what exists. It also watches live reads: they count against limits
while they last, and end when their token becomes invalid.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import math
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Final

from millstream.access.addresses import is_loopback, network_of
from millstream.access.authenticator import Authenticator
from millstream.access.forward_marks import MARK, address_in
from millstream.access.rates import Rate
from millstream.access.scopes import Principal, principal_by_url
from millstream.access.url_tokens import read_url_token
from millstream.caches import show
from millstream.clock import Clock
from millstream.config import LimitsSection
from millstream.errors import Forbidden, InvalidRequest, MillstreamError, TooManyRequests, Unauthorized
from millstream.pending import Pending
from millstream.server.api import needs
from millstream.server.api.routes import Kind, Route
from millstream.server.http.caching import never, private
from millstream.server.http.messages import Answer, BodyStream, Request, Response, Sink, parse_query
from millstream.server.http.metrics import Metrics
from millstream.streams.subscriptions import Subscription

logger = logging.getLogger("millstream.access")

DECISIONS_MAX: Final = 20_000
# A longer path cannot name anything. Decisions about such paths are not cached.
PATH_BYTES_REMEMBERED_MAX: Final = 512


class Gate:
    def __init__(
        self,
        authenticator: Authenticator | None,
        limits: LimitsSection,
        metrics: Metrics,
        clock: Clock,
        subscriptions: Mapping[str, Subscription],
        secret: Callable[[], bytes | None] = lambda: None,
        *,
        open_metrics: bool = False,
        trusted_proxies: frozenset[str] = frozenset(),
    ) -> None:
        self.authenticator = authenticator
        self.clock = clock
        self._metrics = metrics
        self._subscriptions = subscriptions
        self._secret = secret
        self.open_metrics = open_metrics
        self._trusted_proxies = trusted_proxies
        self.sessions: set[Session] = set()
        self.live: Counter[str] = Counter()
        # Cached decisions, by the hash of the credentials. Cleared when full: it soon fills again.
        self._decisions: dict[tuple[bytes, str, bytes], Principal] = {}
        show("decisions", self._decisions, DECISIONS_MAX)
        self.set_limits(limits)

    def set_limits(self, limits: LimitsSection) -> None:
        """Apply limits from now on; the usage so far is forgotten."""
        burst, tracked = limits.burst, limits.tracked_max
        self._limits = limits
        requests = {
            "principal": Rate(limits.principal_requests_per_second, burst, tracked),
            "address": Rate(limits.address_requests_per_second, burst, tracked),
        }
        self.bytes = {
            "principal": Rate(limits.principal_bytes_per_second, burst, tracked),
            "address": Rate(limits.address_bytes_per_second, burst, tracked),
        }
        self._exempts_loopback = limits.exempt_loopback
        self._live_max = {"principal": limits.principal_live_max, "address": limits.address_live_max}
        # The rates by kind of client: for requests, and for bytes.
        self._rates = {
            kind: [
                (name, rate)
                for name, rate in (("requests", requests[kind]), ("bytes", self.bytes[kind]))
                if rate.per_second
            ]
            for kind in requests
        }
        self._meters_bytes = any(rate.per_second for rate in self.bytes.values())

    def admit(self, request: Request, route: Route) -> Session | None:
        """Admit a request, or raise the refusal. A request that must be watched while it is answered gets a session."""
        address = self._limited_address(request)
        if address is not None:
            self._take("address", address, request)
        principal = request.principal = self._authorized(request, route)
        if principal is not None:
            self._take("principal", principal.key, request)
        # Only the answers to reads are large enough to count their bytes.
        if request.method == "GET" and ((is_live := _is_live(request.query)) or self._meters_bytes):
            clients = {} if address is None else {"address": address}
            if principal is not None:
                clients["principal"] = principal.key
            if is_live:
                self._check_live(clients)
            if clients:
                return Session(self, principal, clients, is_live=is_live)
        return None

    def answer_to(self, request: Request, response: Response) -> Response:
        """The answer with its cache fields: if a token was needed, only its holder may cache it, refusals included."""
        if self.authenticator is None or request.is_open:
            return response
        principal = request.principal
        fields = (never if principal is not None and principal.is_by_url else private)(response.fields)
        return Response(response.status, fields, response.body, length=response.length)

    def check_head(self, request: Request, route: Route) -> None:
        """Judge a request before its body arrives, so that a refused body is not received. Nothing is counted yet."""
        address = self._limited_address(request)
        if address is not None:
            self._take("address", address, None)
        route.check()
        if route.kind not in needs.IN_BODY:
            principal = self._authorized(request, route)
            if principal is not None:
                self._take("principal", principal.key, None)

    def _take(self, kind: str, client: str, request: Request | None) -> None:
        """Take what a request uses from its client's rates; without a request, only check that something is left."""
        for name, rate in self._rates[kind]:
            amount = 0 if request is None else 1 if name == "requests" else len(request.body)
            wait = rate.take(client, amount)
            if wait:
                self._limited(f"{kind}_{name}", f"this {kind} uses more than its {name} per second", wait)

    def _authorized(self, request: Request, route: Route) -> Principal | None:
        """The principal that may do this, from the cache or decided now."""
        if self.authenticator is None:
            return None
        shown = request.headers.get(b"authorization")
        decision = (hashlib.sha256(shown).digest(), request.method, request.path) if shown is not None else None
        known = self._decisions.get(decision) if decision is not None else None
        if known is not None and not known.is_expired(self.clock.now_ms()):
            return known
        route.check()
        principal = self._decided(request, route)
        # A PUT may fork, and other kinds of resource may depend on the query or the body, so these are not cached.
        if (
            principal is not None
            and decision is not None
            and route.key is not None
            and request.method != "PUT"
            and len(request.path) <= PATH_BYTES_REMEMBERED_MAX
        ):
            if len(self._decisions) >= DECISIONS_MAX:
                self._decisions.clear()
            self._decisions[decision] = principal
        return principal

    def _decided(self, request: Request, route: Route) -> Principal | None:
        assert self.authenticator is not None
        if needs.is_open(request, route.kind, open_metrics=self.open_metrics):
            request.is_open = True
            return None
        try:
            by_url = self._principal_by_url(request, route)
            if by_url is not None:
                return by_url
            principal = self.authenticator.principal(request.headers.get(b"authorization"))
            needs.check(principal, request, route, self._subscriptions)
        except Unauthorized as error:
            self._metrics.authentication_failures["missing" if error.code == Unauthorized.code else "invalid"] += 1
            raise
        except Forbidden:
            self._metrics.forbidden += 1
            raise
        return principal

    def _principal_by_url(self, request: Request, route: Route) -> Principal | None:
        """The principal of a URL token, which reads one stream and nothing else."""
        assert self.authenticator is not None
        if (
            route.kind is not Kind.STREAM
            or request.method not in ("GET", "HEAD")
            or b"authorization" in request.headers
        ):
            return None
        token, secret = _url_token(request.query), self._secret()
        if token is None or secret is None:
            return None
        grant = read_url_token(secret, token, self.clock.now_ms())
        principal = principal_by_url(grant)
        if not self.authenticator.is_valid(principal):
            raise Unauthorized("the token in the URL was made with one that is no longer good", code="invalid_token")
        if grant.key != route.key:
            raise Forbidden("the token in the URL is for another stream")
        return principal

    def _check_live(self, clients: Mapping[str, str]) -> None:
        for kind, client in clients.items():
            limit = self._live_max[kind]
            if limit and self.live[f"{kind} {client}"] >= limit:
                self._limited(f"{kind}_live", f"this {kind} has as many live reads as it may have", 5)

    def _limited(self, limit: str, message: str, seconds: float) -> None:
        self._metrics.rate_limited[limit] += 1
        hint = "wait as long as Retry-After says"
        raise TooManyRequests(message, hint=hint, retry_after_seconds=max(1, math.ceil(seconds)))

    def client_address(self, request: Request) -> str:
        """The client's address, as far as it can be trusted."""
        mark = request.headers.get(MARK)
        client = address_in(self._secret(), mark) if mark is not None else None
        if client is not None:
            return client
        address = request.address
        if address in self._trusted_proxies:
            hops = [hop.strip() for hop in (request.header(b"x-forwarded-for") or "").split(",")]
            address = next((hop for hop in reversed(hops) if hop and hop not in self._trusted_proxies), address)
        return address

    def _limited_address(self, request: Request) -> str | None:
        """The client's address as limits count it; None if it has no limits."""
        address = self.client_address(request)
        if self._exempts_loopback and request.address not in self._trusted_proxies and is_loopback(address):
            return None
        return network_of(address[:64])

    # -- when tokens change ------------------------------------------------------------------------------------

    def tokens_changed(self) -> int:
        """Clear cached decisions, and end the live reads of principals that are no longer valid; returns how many."""
        self._decisions.clear()
        if self.authenticator is None:
            return 0
        revoked = [
            session
            for session in self.sessions
            if session.principal and not self.authenticator.is_valid(session.principal)
        ]
        for session in revoked:
            session.expire()
        return len(revoked)

    async def watch(self, interval_seconds: float) -> None:
        """Reload the token and key files when they change."""
        while self.authenticator is not None:
            await asyncio.sleep(interval_seconds)
            if self.authenticator.has_changed():
                try:
                    logger.info("the token files changed: %s", self.authenticator.reload())
                    self.tokens_changed()
                except MillstreamError as error:
                    logger.error("the token files changed and cannot be used; the former ones stay: %s", error)


def _is_live(query: bytes) -> bool:
    """Whether a query asks for a live read, in any encoding that its handler accepts."""
    try:
        return bool(query) and "live" in parse_query(query)
    except InvalidRequest:
        return False  # every handler that reads the query refuses it


def _url_token(query: bytes) -> str | None:
    try:
        return parse_query(query).get("token") if query else None
    except InvalidRequest:
        return None


class Session:
    """A request that the gate watches until it is answered, and a live read until it ends. It wraps the answer's body
    stream, and is the sink that the wrapped stream writes to."""

    def __init__(self, gate: Gate, principal: Principal | None, clients: Mapping[str, str], *, is_live: bool) -> None:
        self.principal = principal
        self._gate = gate
        self._clients = clients
        self._is_live = is_live
        # While the answer is pending: the handler's outcome, and the outcome that the client waits for.
        self._work: Pending[Response] | None = None
        self._outcome: Pending[Response] | None = None
        # While a body is sent.
        self._body: BodyStream | None = None
        self._sink: Sink | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._is_closed = False
        if is_live:
            gate.sessions.add(self)
            for kind, client in clients.items():
                gate.live[f"{kind} {client}"] += 1
            if principal is not None and principal.expires_at_ms is not None:
                seconds = (principal.expires_at_ms - gate.clock.now_ms()) / 1000
                self._timer = asyncio.get_running_loop().call_later(seconds, self.expire)

    def watch(self, answer: Answer) -> Answer:
        """The answer with this session watching it."""
        if isinstance(answer, Response):
            return self._watched(answer)
        self._work = answer
        outcome: Pending[Response] = Pending(on_abandon=self._abandon)
        self._outcome = outcome
        answer.when_settled(self._settle)
        return outcome

    def _settle(self, result: Response | MillstreamError) -> None:
        outcome = self._outcome
        self._work = self._outcome = None
        if isinstance(result, MillstreamError):
            self.close()
        else:
            result = self._watched(result)
        if outcome is not None:
            outcome.settle(result)

    def _watched(self, response: Response) -> Response:
        if isinstance(response.body, bytes):
            self._spend(len(response.body))
            self.close()
            return response
        self._body = response.body
        return Response(response.status, response.fields, self, length=response.length)

    def _abandon(self) -> None:
        """The client disconnected while it was waiting."""
        work = self._work
        self.close()
        if work is not None:
            work.abandon()

    def expire(self) -> None:
        """The token is no longer valid: end the read in a way that the client can recognise."""
        if self._is_closed:
            return
        outcome = self._outcome
        if self._sink is not None and self._body is not None:
            self.close()
            self._body.cancel()
            self._sink.finish()
        elif outcome is not None:
            outcome.interrupt(Unauthorized("the token has expired", code="invalid_token"))

    def close(self) -> None:
        if not self._is_closed:
            self._is_closed = True
            self._work = self._outcome = None
            if self._timer is not None:
                self._timer.cancel()
            if self._is_live:
                self._gate.sessions.discard(self)
                self._leave()

    def _leave(self) -> None:
        live = self._gate.live
        for kind, client in self._clients.items():
            name = f"{kind} {client}"
            live[name] -= 1
            if live[name] <= 0:
                del live[name]

    def _spend(self, size: int) -> None:
        for kind, client in self._clients.items():
            self._gate.bytes[kind].spend(client, size)

    # -- as a body stream ------------------------------------------------------------------------------------

    def start(self, sink: Sink) -> None:
        assert self._body is not None
        self._sink = sink
        self._body.start(self)

    def resume(self) -> None:
        if self._body is not None and not self._is_closed:
            self._body.resume()

    def cancel(self) -> None:
        if self._body is not None:
            self._body.cancel()
        self.close()

    # -- as that one's sink ----------------------------------------------------------------------------------

    def write(self, data: bytes) -> bool:
        assert self._sink is not None
        self._spend(len(data))
        return self._sink.write(data)

    def finish(self) -> None:
        assert self._sink is not None
        self.close()
        self._sink.finish()

    def abort(self) -> None:
        assert self._sink is not None
        self.close()
        self._sink.abort()
