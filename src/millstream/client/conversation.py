"""A call from its first attempt to its result: redirects, pauses and retries, without I/O.

A conversation is a generator. It yields steps (`Send`, `Open`, `Receive`, `Pause`), is sent the outcome of each, and
returns the call's result; live reads also `Emit` items for the caller. The blocking and the asynchronous client differ
only in the driver that carries out the steps.
"""

from __future__ import annotations

import re
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Generator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final, Generic, NamedTuple, TypeAlias, TypeVar
from urllib.parse import parse_qsl, urlencode, urljoin, urlsplit

from millstream.client.errors import BadAnswer, BadRequest, ClientError, error_of
from millstream.client.messages import AsyncValue, AsyncValues, Origin, Request, Response
from millstream.client.retries import Attempts, RetryPolicy
from millstream.clock import Clock

T = TypeVar("T")

_NAME: Final = re.compile(r"[!#$%&'*+.^_`|~0-9a-z-]+")
_OF_THE_CONNECTION: Final = frozenset({"connection", "content-length", "te", "trailer", "transfer-encoding", "upgrade"})

REDIRECTS_MAX: Final = 5
LEADERS_MAX: Final = 4096


class Send(NamedTuple):
    """Send a request and read the whole answer. Sent back: a Response, or the ClientError that came instead."""

    origin: Origin
    request: Request
    is_live: bool = False


class Open(NamedTuple):
    """The same, but of a 200 only the head is read."""

    origin: Origin
    request: Request
    is_live: bool = True


class Receive(NamedTuple):
    """Read on in the opened answer. Sent back: bytes, none at its end, or a ClientError."""


class Pause(NamedTuple):
    seconds: float


class Evaluate(NamedTuple):
    """Call the function that gives a header's or a parameter's value. Sent back: the value."""

    function: Callable[[], str | Awaitable[str]]


class Emit(NamedTuple):
    """Hand this to the caller."""

    item: Any


Step: TypeAlias = Send | Open | Receive | Pause | Evaluate | Emit
Conversation: TypeAlias = Generator[Step, Any, T]


@dataclass(frozen=True, slots=True)
class Call(Generic[T]):
    """One request and what its answer means."""

    request: Request
    parse: Callable[[Response], T]
    can_repeat: bool = True
    # Statuses that a repeat gets if an earlier attempt was carried out after all.
    done_if_repeated: frozenset[int] = frozenset()
    # Statuses from 400 on that are results of this call, not errors.
    answers: frozenset[int] = frozenset()
    # Whether the server delays the answer until there is something to send.
    is_live: bool = False


class LeaderCache:
    """The server that last answered for a stream after a redirect, so that only the first request is redirected."""

    def __init__(self) -> None:
        self._origins: OrderedDict[str, Origin] = OrderedDict()

    def find(self, path: str) -> Origin | None:
        return self._origins.get(path) if self._origins else None

    def moved(self, path: str, origin: Origin) -> None:
        self._origins.pop(path, None)
        self._origins[path] = origin
        if len(self._origins) > LEADERS_MAX:
            self._origins.popitem(last=False)

    def forget(self, path: str) -> None:
        if self._origins:
            self._origins.pop(path, None)


class Place(NamedTuple):
    """A server, and the path prefix of its routes, if there is one."""

    origin: Origin
    root: str


class Places:
    """The servers of one cluster, any of which may be asked; after a failure the next one is used."""

    def __init__(self, places: Sequence[Place]) -> None:
        self._places = tuple(places)
        self._index = 0

    @property
    def current(self) -> Place:
        return self._places[self._index]

    def include(self, origin: Origin) -> bool:
        """Whether this is one of the servers."""
        return any(place.origin == origin for place in self._places)

    def failed(self, origin: Origin) -> None:
        if self.current.origin == origin:
            self._index = (self._index + 1) % len(self._places)


@dataclass(frozen=True, slots=True)
class Settings:
    """What all conversations of one client share."""

    places: Places
    token: AsyncValue | None = field(repr=False)
    policy: RetryPolicy  # for calls
    patient_policy: RetryPolicy  # for followers and producers, which must outlast a restart
    clock: Clock
    leaders: LeaderCache = field(default_factory=LeaderCache)
    # Sent with every request, in addition to the call's own.
    headers: AsyncValues = field(default_factory=dict, repr=False)
    params: AsyncValues = field(default_factory=dict, repr=False)

    def adding(self, headers: AsyncValues | None, params: AsyncValues | None) -> Settings:
        """The same settings with more headers and query parameters, which take precedence."""
        if not headers and not params:
            return self
        added = {_header_name(name): value for name, value in (headers or {}).items()}
        return replace(self, headers={**self.headers, **added}, params={**self.params, **(params or {})})


def _header_name(name: str) -> str:
    lowered = name.lower()
    if _NAME.fullmatch(lowered) is None or lowered in _OF_THE_CONNECTION:
        raise BadRequest(f"{name!r} is not a header that a client may set")
    return lowered


def parse_url(url: str) -> Place:
    """A base URL as an origin to connect to and the path below which the server is mounted."""
    try:
        parts = urlsplit(url)
        port = parts.port
    except ValueError:
        parts, port = urlsplit(""), None
    if parts.scheme not in ("http", "https") or not parts.hostname or parts.query or parts.fragment or parts.username:
        raise BadRequest(f"{url!r} is not the URL of a server", hint="write it as http://127.0.0.1:4437")
    origin = Origin(parts.scheme, parts.hostname, port or (443 if parts.scheme == "https" else 80))
    return Place(origin, parts.path.rstrip("/"))


def settings_of(
    url: str | Sequence[str],
    token: AsyncValue | None,
    retries: int | RetryPolicy,
    patience: int | RetryPolicy,
    clock: Clock,
) -> Settings:
    urls = url.split(",") if isinstance(url, str) else url
    places = Places([parse_url(one.strip()) for one in urls] or [parse_url("")])
    policy = RetryPolicy(retries=retries) if isinstance(retries, int) else retries
    # A client that outlasts a restart should also notice soon that it is over.
    patient = RetryPolicy(retries=patience, pause_seconds_max=2.0) if isinstance(patience, int) else patience
    return Settings(places, token, policy, patient, clock)


def converse(call: Call[T], settings: Settings, attempts: Attempts | None = None) -> Conversation[T]:
    """The call's result, after as many attempts as it needs and the policy allows."""
    if attempts is None:
        attempts = Attempts(settings.policy, settings.clock, can_repeat=call.can_repeat)
    while True:
        answer = yield from ask(call.request, settings, is_live=call.is_live)
        if isinstance(answer, Response):
            is_done = attempts.may_be_done and answer.status in call.done_if_repeated
            if answer.status < 400 or answer.status in call.answers or is_done:
                return call.parse(answer)
            answer = error_of(call.request, answer)
        yield Pause(attempts.pause_after(answer))


def ask(
    request: Request, settings: Settings, step: type[Send] | type[Open] = Send, *, is_live: bool = False
) -> Conversation[Response | ClientError]:
    """One attempt, following redirects."""
    path = request.target.partition("?")[0]
    origin, target = _destination(request.target, settings.places.current)
    origin = settings.leaders.find(path) or origin
    request = yield from _completed(request._replace(target=target), settings)
    for _ in range(REDIRECTS_MAX + 1):
        answer: Response | ClientError = yield step(origin, request, is_live)
        if isinstance(answer, ClientError) or answer.status == 503:
            settings.leaders.forget(path)
            settings.places.failed(origin)
            return answer
        if answer.status not in (307, 308):
            return answer
        moved_to, target = _location(origin, request, answer)
        if target == request.target and moved_to != origin:
            settings.leaders.moved(path, moved_to)
        origin, request = moved_to, request._replace(target=target)
    settings.leaders.forget(path)
    raise BadAnswer(f"{path} was redirected more than {REDIRECTS_MAX} times", hint="ask the cluster who leads")


def _destination(target: str, place: Place) -> tuple[Origin, str]:
    if target.startswith("/"):
        return place.origin, place.root + target
    parts = urlsplit(target)
    origin = parse_url(f"{parts.scheme}://{parts.netloc}").origin
    return origin, (parts.path or "/") + (f"?{parts.query}" if parts.query else "")


def _completed(request: Request, settings: Settings) -> Conversation[Request]:
    """The request with the token and the user's headers and parameters; the call's own take precedence."""
    headers, target = dict(request.headers), request.target
    for name, value in settings.headers.items():
        if name not in request.headers:
            headers[name] = yield from _evaluated(value)
    if settings.token is not None and "authorization" not in headers:
        headers["authorization"] = "Bearer " + (yield from _evaluated(settings.token))
    if settings.params:
        path, _, query = target.partition("?")
        params = dict(parse_qsl(query, keep_blank_values=True))
        for name, value in settings.params.items():
            if name not in params:
                params[name] = yield from _evaluated(value)
        target = f"{path}?{urlencode(sorted(params.items()))}"
    return request._replace(headers=headers, target=target)


def _evaluated(value: AsyncValue) -> Conversation[str]:
    if isinstance(value, str):
        return value
    found: str = yield Evaluate(value)
    return found


def _location(origin: Origin, request: Request, answer: Response) -> tuple[Origin, str]:
    """The target of a redirect. The token is sent there too: nodes of a cluster redirect clients to each other."""
    location = answer.headers.get("location", "")
    try:
        parts = urlsplit(urljoin(f"{origin}{request.target}", location))
        place = parse_url(f"{parts.scheme}://{parts.netloc}" if location else "")
    except (BadRequest, ValueError):
        raise BadAnswer(f"the server redirects to {location[:200]!r}, which is no address") from None
    if origin.scheme == "https" and place.origin.scheme != "https":
        raise BadAnswer(f"the server redirects from https to {location[:200]!r}", hint="fix its public_url")
    return place.origin, (parts.path or "/") + (f"?{parts.query}" if parts.query else "")
