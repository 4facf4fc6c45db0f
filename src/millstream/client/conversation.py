"""A call from its first attempt to its answer: redirects, pauses and retries, without doing any of the I/O.

A conversation is a generator. It yields what is to be done (`Send`, `Open`, `Receive`, `Pause`), is sent what came of
it, and returns the call's result; live reads also `Emit` what they have for the caller. The sync and the async client
differ only in who carries the steps out.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, Generic, NamedTuple, TypeAlias, TypeVar
from urllib.parse import urljoin, urlsplit

from millstream.client.errors import BadAnswer, BadRequest, ClientError, error_of
from millstream.client.messages import Origin, Request, Response
from millstream.client.retries import Attempts, RetryPolicy
from millstream.clock import Clock

T = TypeVar("T")

REDIRECTS_MAX: Final = 5
HOMES_MAX: Final = 4096


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


class Emit(NamedTuple):
    """Hand this to the caller."""

    item: Any


Step: TypeAlias = Send | Open | Receive | Pause | Emit
Conversation: TypeAlias = Generator[Step, Any, T]


@dataclass(frozen=True, slots=True)
class Call(Generic[T]):
    """One request and what its answer means."""

    request: Request
    parse: Callable[[Response], T]
    can_repeat: bool = True
    # What a repeat is told if an earlier attempt was carried out after all.
    done_if_repeated: frozenset[int] = frozenset()
    # Statuses from 400 on that are answers to it, not errors.
    answers: frozenset[int] = frozenset()
    # Whether the server holds the answer back until there is something to say.
    is_live: bool = False


class Homes:
    """Where streams were last found after a redirect, so that only the first request takes the detour."""

    def __init__(self) -> None:
        self._origins: OrderedDict[str, Origin] = OrderedDict()

    def find(self, path: str) -> Origin | None:
        return self._origins.get(path) if self._origins else None

    def moved(self, path: str, origin: Origin) -> None:
        self._origins.pop(path, None)
        self._origins[path] = origin
        if len(self._origins) > HOMES_MAX:
            self._origins.popitem(last=False)

    def forget(self, path: str) -> None:
        if self._origins:
            self._origins.pop(path, None)


class Place(NamedTuple):
    """A server, and the path below which its routes are, if there is one."""

    origin: Origin
    root: str


class Places:
    """The servers of one cluster, any of which may be asked; the next one's turn comes when one fails."""

    def __init__(self, places: Sequence[Place]) -> None:
        self._places = tuple(places)
        self._index = 0

    @property
    def current(self) -> Place:
        return self._places[self._index]

    def failed(self, origin: Origin) -> None:
        if self.current.origin == origin:
            self._index = (self._index + 1) % len(self._places)


@dataclass(frozen=True, slots=True)
class Settings:
    """What all conversations of one client share."""

    places: Places
    token: str | None = field(repr=False)
    policy: RetryPolicy  # of calls somebody waits for
    patient_policy: RetryPolicy  # of followers and producers, which are to outlast a restart
    clock: Clock
    homes: Homes = field(default_factory=Homes)


def parse_url(url: str) -> Place:
    """A base URL as where to connect to, and the path below which the server is mounted."""
    try:
        parts = urlsplit(url)
        port = parts.port
    except ValueError:
        parts, port = urlsplit(""), None
    if parts.scheme not in ("http", "https") or not parts.hostname or parts.query or parts.fragment or parts.username:
        raise BadRequest(f"{url!r} is not the URL of a server", hint="write it as http://127.0.0.1:4437")
    origin = Origin(parts.scheme, parts.hostname, port or (443 if parts.scheme == "https" else 80))
    return Place(origin, parts.path.rstrip("/"))


def settings_of(url: str | Sequence[str], token: str | None, retries: int, patience: int, clock: Clock) -> Settings:
    if retries < 0 or patience < 0:
        raise BadRequest(f"retries={retries} and patience={patience} must be 0 or more")
    urls = url.split(",") if isinstance(url, str) else url
    places = Places([parse_url(one.strip()) for one in urls] or [parse_url("")])
    # What outlasts a restart should also notice soon that it is over.
    patient = RetryPolicy(retries=patience, pause_seconds_max=2.0)
    return Settings(places, token, RetryPolicy(retries=retries), patient, clock)


def converse(call: Call[T], settings: Settings, attempts: Attempts | None = None) -> Conversation[T]:
    """The call's result, after as many attempts as it takes and the policy allows."""
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
    """One attempt, wherever redirects lead it."""
    path = request.target.partition("?")[0]
    place = settings.places.current
    origin = settings.homes.find(path) or place.origin
    request = request._replace(target=place.root + request.target)
    if settings.token is not None:
        request = request._replace(headers={**request.headers, "authorization": f"Bearer {settings.token}"})
    for _ in range(REDIRECTS_MAX + 1):
        answer: Response | ClientError = yield step(origin, request, is_live)
        if isinstance(answer, ClientError) or answer.status == 503:
            settings.homes.forget(path)
            settings.places.failed(origin)
            return answer
        if answer.status not in (307, 308):
            return answer
        moved_to, target = _location(origin, request, answer)
        if target == request.target and moved_to != origin:
            settings.homes.moved(path, moved_to)
        origin, request = moved_to, request._replace(target=target)
    settings.homes.forget(path)
    raise BadAnswer(f"{path} was redirected more than {REDIRECTS_MAX} times", hint="ask the cluster who leads")


def _location(origin: Origin, request: Request, answer: Response) -> tuple[Origin, str]:
    """Where a redirect points. The token goes along: nodes of a cluster send clients to each other."""
    location = answer.headers.get("location", "")
    try:
        parts = urlsplit(urljoin(f"{origin}{request.target}", location))
        place = parse_url(f"{parts.scheme}://{parts.netloc}" if location else "")
    except (BadRequest, ValueError):
        raise BadAnswer(f"the server redirects to {location[:200]!r}, which is no address") from None
    if origin.scheme == "https" and place.origin.scheme != "https":
        raise BadAnswer(f"the server redirects from https to {location[:200]!r}", hint="fix its public_url")
    return place.origin, (parts.path or "/") + (f"?{parts.query}" if parts.query else "")
