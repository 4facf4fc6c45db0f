"""What an adapter serves: whoever answers requests, however many shards or nodes stand behind."""

from __future__ import annotations

from typing import Protocol

from millstream.errors import MillstreamError
from millstream.server.http.messages import Answer, Request, Response, Upload
from millstream.server.http.metrics import Metrics
from millstream.tasks import Supervisor


class LiveReads(Protocol):
    def end_all(self) -> None: ...


class Application(Protocol):
    metrics: Metrics
    supervisor: Supervisor
    logs_access: bool

    @property
    def live_reads(self) -> LiveReads: ...

    @property
    def judges_heads(self) -> bool:
        """Whether `refusal_of_head` may refuse anything."""
        ...

    def handle(self, request: Request) -> Answer:
        """Answer a request, now or later, whatever happens."""
        ...

    def upload_for(self, method: str, target: bytes, body_bytes_max: int) -> tuple[Upload | None, int]:
        """Where a request's body should go while it arrives, if not into memory; and how large it may be."""
        ...

    def refusal_of_head(self, request: Request) -> Response | None:
        """The answer to a request whose body need not be awaited, since it would be refused."""
        ...

    def answered(self, request: Request, outcome: Response | MillstreamError) -> Response:
        """Called with what became of a request, whoever decided that; returns what is to be sent."""
        ...

    def worded(self, target: bytes, refusal: Response) -> Response:
        """A refusal that an adapter gives by itself, in the words of the protocol that its target belongs to."""
        ...
