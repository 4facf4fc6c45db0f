"""The interface between adapters and the application, whatever number of shards or nodes is behind it."""

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
    judges_heads: bool
    """Whether `refusal_of_head` may refuse anything."""

    @property
    def live_reads(self) -> LiveReads: ...

    def handle(self, request: Request) -> Answer:
        """Answer a request, now or later. Never raises."""
        ...

    def upload_for(self, method: str, target: bytes, body_bytes_max: int) -> tuple[Upload | None, int]:
        """Where a request's body goes while it arrives, None for memory; and how large it may be."""
        ...

    def refusal_of_head(self, request: Request) -> Response | None:
        """The refusal of a request, judged by its head alone, so that its body need not be received; None to receive
        it."""
        ...

    def answered(self, request: Request, outcome: Response | MillstreamError) -> Response:
        """Called with the outcome of every request, also of those that an adapter refused; returns what is to be
        sent."""
        ...

    def format_refusal(self, target: bytes, refusal: Response) -> Response:
        """An adapter's own refusal, in the error format of the protocol that the target belongs to."""
        ...
