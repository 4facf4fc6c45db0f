"""What the data source asks a server over HTTP: where history lies, the feed, and appends.

Every request has a time limit. What may pass (a restart, a change of leader, 429 and 503) is tried again until the
option `serverTimeout` is used up; what will not is an error that names the option to change.
"""

from __future__ import annotations

import http.client
import random
import time
from collections.abc import Sequence
from typing import Any, Final, NamedTuple
from urllib.parse import quote, urlencode, urljoin, urlsplit

import msgspec
import pyarrow as arrow

from millstream.protocol.keys import StreamKey
from millstream.protocol.producers import ProducerClaim
from millstream.spark.errors import SourceError
from millstream.spark.options import Connection
from millstream.streams.records import SegmentRef

ARROW_TYPE: Final = "application/vnd.apache.arrow.stream"
REQUEST_SECONDS: Final = 60.0
FIRST_CONTACT_SECONDS: Final = 3.0
PAUSE_SECONDS: Final = (0.05, 2.0)
INCARNATIONS_AT_ONCE: Final = 50_000
REDIRECTS_MAX: Final = 5
RETRIED: Final = (408, 429, 502, 503, 504)


class Answer(NamedTuple):
    status: int
    headers: dict[str, str]
    body: bytes

    @property
    def problem(self) -> dict[str, str]:
        """The server's own words: code, message, hint."""
        try:
            found = msgspec.json.decode(self.body)["error"]
            return {name: str(value) for name, value in found.items()}
        except (msgspec.MsgspecError, KeyError, TypeError, AttributeError, UnicodeDecodeError):
            return {"code": "", "message": self.body[:200].decode(errors="replace")}


class Shard(msgspec.Struct, frozen=True):
    """One shard's part of a bucket, as of one moment: through `flushed` in segments, then in the feed."""

    shard: int
    earliest: int
    flushed: int
    latest: int
    unflushed_bytes: int
    segments: list[dict[str, Any]]

    def refs(self) -> list[SegmentRef]:
        return [SegmentRef(**segment) for segment in self.segments]


class Store(msgspec.Struct, frozen=True):
    backend: str
    path: str
    options: dict[str, str]


class Cold(msgspec.Struct, frozen=True):
    bucket: str
    store: Store
    shards: list[Shard]


class FeedPage(NamedTuple):
    table: arrow.Table
    position: int
    is_up_to_date: bool


_COLD: Final = msgspec.json.Decoder(Cold)


class Server:
    """One keep-alive connection to a server; not for several threads at a time."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._base = urlsplit(connection.url)
        self._links: dict[tuple[str, str], http.client.HTTPConnection] = {}

    def close(self) -> None:
        for link in self._links.values():
            link.close()
        self._links.clear()

    # -- reading ---------------------------------------------------------------------------------------------

    def check_bucket(self, bucket: str) -> None:
        """Whether there is such a server, such a bucket, and leave to read it: said before anything is planned."""
        self._expect(self._ask("GET", _path(bucket), patience=FIRST_CONTACT_SECONDS), bucket)

    def cold(self, bucket: str, after: int | None = None, *, patience: float | None = None) -> Cold:
        query = f"?after=0.{after}" if after is not None and after >= 0 else ""
        answer = self._ask("GET", f"{_path(bucket)}/streams/cold{query}", patience=patience)
        self._expect(answer, bucket)
        return _COLD.decode(answer.body)

    def alive(self, bucket: str, incarnations: Sequence[int]) -> dict[int, int]:
        """Those of the incarnations that still count, and the offset before which nothing of them does."""
        alive: dict[int, int] = {}
        for start in range(0, len(incarnations), INCARNATIONS_AT_ONCE):
            body = msgspec.json.encode({"incarnations": incarnations[start : start + INCARNATIONS_AT_ONCE]})
            answer = self._ask("POST", f"{_path(bucket)}/streams/cold", {"content-type": "application/json"}, body)
            self._expect(answer, bucket)
            alive |= dict(msgspec.json.decode(answer.body, type=dict[str, list[tuple[int, int]]])["alive"])
        return alive

    def feed(self, bucket: str, shard: int, after: int, prefix: str, bytes_max: int | None = None) -> FeedPage:
        """What happened in a bucket after a position, events that are no messages included."""
        query = {"after": f"{shard}.{after}", "prefix": prefix, "max_bytes": bytes_max}
        answer = self._ask("GET", _feed_path(bucket, query), {"accept": ARROW_TYPE})
        self._expect(answer, bucket)
        return _page(answer)

    def wait_for_news(self, bucket: str, shard: int, after: int, prefix: str, seconds: float) -> bool:
        """Whether something happens in the bucket after a position, within about so many seconds."""
        query = {"after": f"{shard}.{after}", "prefix": prefix, "max_bytes": 1, "live": "long-poll"}
        try:
            answer = self._exchange("GET", _feed_path(bucket, query), {"accept": ARROW_TYPE}, b"", seconds)
        except (OSError, http.client.HTTPException):
            self.close()
            return False  # nothing within the time, or no server: the next look will tell
        return answer.status == 200 and _page(answer).table.num_rows > 0

    def content_type(self, key: StreamKey) -> str | None:
        """A stream's content type, None if there is no such stream."""
        answer = self._ask("HEAD", _stream_path(key))
        if answer.status in (404, 410):
            return None
        self._expect(answer, key.bucket)
        return answer.headers.get("content-type", "")

    # -- writing ---------------------------------------------------------------------------------------------

    def create(self, key: StreamKey, content_type: str) -> Answer:
        return self._ask("PUT", _stream_path(key), {"content-type": content_type})

    def append(self, key: StreamKey, content_type: str, body: bytes, claim: ProducerClaim) -> Answer:
        """An append that may be repeated: whoever sent it first, the server takes it once."""
        headers = {
            "content-type": content_type,
            "producer-id": claim.id,
            "producer-epoch": str(claim.epoch),
            "producer-seq": str(claim.seq),
        }
        return self._ask("POST", _stream_path(key), headers, body)

    # -- the wire --------------------------------------------------------------------------------------------

    def _expect(self, answer: Answer, bucket: str) -> None:
        if answer.status < 300:
            return
        problem = answer.problem
        url = self._connection.url
        if answer.status == 401 or (answer.status == 403 and problem["code"] != "producer_fenced"):
            token = (
                "the option 'token' is missing"
                if self._connection.token is None
                else "the option 'token' is not accepted"
            )
            raise SourceError(
                f"{url} refuses access to bucket {bucket!r}: {token} ({problem['message']})",
                hint="give a token that may read and write this bucket",
            )
        if problem["code"] == "bucket_not_found":
            raise SourceError(
                f"the option or column 'bucket' is {bucket!r}, and {url} has no such bucket",
                hint=f"create it (curl -X PUT {url}/{bucket}), or correct the name",
            )
        if problem["code"] == "invalid_path" or problem["code"] == "invalid_bucket":
            raise SourceError(
                f"the option 'bucket' is {bucket!r}: {problem['message']}",
                hint="a bucket has 4 to 64 of a-z, 0-9, _ and -",
            )
        if not problem["code"]:
            raise SourceError(
                f"what answers at {url} is no millstream server (status {answer.status})",
                hint="correct the option 'url'",
            )
        raise SourceError(
            f"{url} answered {answer.status} {problem['code']}: {problem['message']}", hint=problem.get("hint")
        )

    def _ask(
        self,
        method: str,
        target: str,
        headers: dict[str, str] | None = None,
        body: bytes = b"",
        *,
        patience: float | None = None,
    ) -> Answer:
        """The answer, after as many attempts as there is patience for."""
        limit = (
            self._connection.timeout_seconds if patience is None else min(patience, self._connection.timeout_seconds)
        )
        deadline = time.monotonic() + limit
        pause, longest = PAUSE_SECONDS
        while True:
            try:
                answer = self._exchange(method, target, headers or {}, body, REQUEST_SECONDS)
                if answer.status not in RETRIED:
                    return answer
                reason = f"{answer.status} {answer.problem['message']}"
            except (OSError, http.client.HTTPException) as error:
                self.close()
                reason = str(error) or type(error).__name__
            if time.monotonic() + pause > deadline:
                raise SourceError(
                    f"no server answers at {self._connection.url} ({reason}), tried for {limit:.0f} s",
                    hint="check the option 'url', and that the server runs and is reachable from here",
                )
            time.sleep(pause * random.uniform(0.5, 1.0))
            pause = min(pause * 2, longest)

    def _exchange(self, method: str, target: str, headers: dict[str, str], body: bytes, seconds: float) -> Answer:
        url = self._base.geturl().rstrip("/") + target
        if self._connection.token is not None:
            headers = {**headers, "authorization": f"Bearer {self._connection.token}"}
        for _ in range(REDIRECTS_MAX):
            answer = self._send(method, url, headers, body, seconds)
            if answer.status not in (307, 308):
                return answer
            url = urljoin(url, answer.headers.get("location", ""))
        raise OSError(f"{target} was redirected more than {REDIRECTS_MAX} times")

    def _send(self, method: str, url: str, headers: dict[str, str], body: bytes, seconds: float) -> Answer:
        parts = urlsplit(url)
        link = self._links.get((parts.scheme, parts.netloc))
        is_new = link is None
        if link is None:
            kind = http.client.HTTPSConnection if parts.scheme == "https" else http.client.HTTPConnection
            link = self._links[parts.scheme, parts.netloc] = kind(parts.netloc, timeout=seconds)
        link.timeout = seconds
        if link.sock is not None:
            link.sock.settimeout(seconds)
        path = parts.path + (f"?{parts.query}" if parts.query else "")
        try:
            link.request(method, path, body or None, headers)
            response = link.getresponse()
            content = response.read()
        except (http.client.RemoteDisconnected, BrokenPipeError, ConnectionResetError):
            link.close()
            if is_new:
                raise
            del self._links[parts.scheme, parts.netloc]  # the server had let an idle connection go
            return self._send(method, url, headers, body, seconds)
        return Answer(response.status, {name.lower(): value for name, value in response.getheaders()}, content)


def _path(bucket: str) -> str:
    return f"/{quote(bucket, safe='')}"


def _feed_path(bucket: str, query: dict[str, Any]) -> str:
    given = {name: value for name, value in query.items() if value is not None and value != ""}
    return f"{_path(bucket)}/streams/feed?{urlencode(given)}"


def _stream_path(key: StreamKey) -> str:
    return f"/v1/stream/{quote(key.v1_path, safe='/')}"


def _page(answer: Answer) -> FeedPage:
    position = int(answer.headers["stream-feed-token"].partition(".")[2])
    with arrow.ipc.open_stream(answer.body) as reader:
        return FeedPage(reader.read_all(), position, answer.headers.get("stream-up-to-date") == "true")
