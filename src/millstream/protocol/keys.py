"""Names: buckets, streams, and the URL paths that spell them.

`/v1/stream/{path}` maps to a bucket and a stream at its first slash; a path without one lives in `_default`.
`/{bucket}/{stream}` names the same stream under the stricter rules of Extensions §1.1.
"""

from __future__ import annotations

import re
from typing import Final
from urllib.parse import unquote_to_bytes

import msgspec

from millstream.errors import InvalidRequest

DEFAULT_BUCKET: Final = "_default"
KEY_BYTES_MAX: Final = 122

_BUCKET = re.compile(r"[a-z0-9_-]{4,64}")
_BAD_ESCAPE = re.compile(rb"%(?![0-9A-Fa-f]{2})")

RESERVED_BUCKETS: Final = frozenset({"v1", "healthz", "readyz", "metrics", "cluster", "console", "__ds"})
RESERVED_STREAMS: Final = frozenset({"streams"})


class StreamKey(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """The name of a stream. A struct, because there may be very many: the collector need not look at it."""

    bucket: str
    stream: str

    def __str__(self) -> str:
        return f"{self.bucket}/{self.stream}"

    @property
    def v1_path(self) -> str:
        """The path below `/v1/stream/` that names this stream."""
        return self.stream if self.bucket == DEFAULT_BUCKET else f"{self.bucket}/{self.stream}"


def decode_segment(raw: bytes) -> str:
    """A percent-encoded piece of a path as text, or a refusal that says what is wrong with it."""
    if b"%" in raw:
        if _BAD_ESCAPE.search(raw) is not None:
            raise InvalidRequest("the path has a malformed percent-encoding", code="invalid_path")
        raw = unquote_to_bytes(raw)
    try:
        text = raw.decode("utf-8")
    except UnicodeDecodeError:
        raise InvalidRequest("the path is not valid UTF-8", code="invalid_path") from None
    if "\0" in text:
        raise InvalidRequest("the path contains a NUL byte", code="invalid_path")
    return text


def checked_key(bucket: str, stream: str) -> StreamKey:
    """The key of a stream, if both names may be what they are."""
    if not bucket or not stream:
        raise InvalidRequest("the path names no stream", code="invalid_path")
    if ".." in bucket or ".." in stream:
        raise InvalidRequest("a stream name must not contain '..'", code="invalid_path")
    size = len(bucket) + 1 + len(stream)
    if not (bucket.isascii() and stream.isascii()):
        size = len(bucket.encode()) + 1 + len(stream.encode())
    if size > KEY_BYTES_MAX:
        raise InvalidRequest(
            f"bucket and stream name together take {size} bytes",
            code="invalid_path",
            hint=f"at most {KEY_BYTES_MAX} bytes are allowed, the slash between them included",
        )
    return StreamKey(bucket, stream)


def parse_v1_path(path: str) -> StreamKey:
    """A decoded path below `/v1/stream/` as a key; further slashes belong to the stream's name."""
    bucket, slash, stream = path.partition("/")
    if not slash:
        bucket, stream = DEFAULT_BUCKET, path
    if bucket == "__ds":
        raise InvalidRequest("paths below __ds/ are reserved", code="invalid_path")
    if bucket == DEFAULT_BUCKET and "/" in stream:
        raise InvalidRequest(f"a stream in {DEFAULT_BUCKET} has no '/' in its name", code="invalid_path")
    return checked_key(bucket, stream)


def parse_bucket(name: str) -> str:
    if _BUCKET.fullmatch(name) is None or name in RESERVED_BUCKETS:
        raise InvalidRequest(
            f"{name[:80]!r} is not a bucket name",
            code="invalid_bucket",
            hint="4 to 64 of a-z, 0-9, _ and -, and none of the reserved names",
        )
    return name


def parse_bucketed(bucket: str, stream: str) -> StreamKey:
    """The two decoded segments of `/{bucket}/{stream}` as a key."""
    if "/" in stream:
        raise InvalidRequest("a stream name must not contain '/'", code="invalid_path")
    return parse_snapshot_owner(bucket, stream)


def parse_snapshot_owner(bucket: str, stream: str) -> StreamKey:
    """The stream whose snapshots and bootstrap a path is about: its name may have slashes, as documents' names do."""
    if stream in RESERVED_STREAMS:
        raise InvalidRequest(f"the stream name {stream!r} is reserved", code="invalid_path")
    return checked_key(parse_bucket(bucket), stream)


V1_ROOT: Final = b"/v1/stream/"
_PLAIN_NAME_MAX: Final = 60
# What nearly all names are like: nothing to decode, nothing that could be forbidden but the one reserved word.
_PLAIN: Final = re.compile(
    re.escape(V1_ROOT.decode()) + rf"(?!__ds(?:/|$))(?:([A-Za-z0-9_-]{{1,60}})/)?([A-Za-z0-9_-]{{1,{_PLAIN_NAME_MAX}}})"
)


# What came before the last slash of plain paths, and the bucket that it means; all are forgotten when there are many.
_buckets: dict[bytes, str] = {}
_BUCKETS_MAX: Final = 1024


def plain_key_of(path: bytes) -> StreamKey | None:
    """The stream that a URL path names, if that is plain to see."""
    before, _, name = path.rpartition(b"/")
    bucket = _buckets.get(before)
    if bucket is not None and (name.isalnum() or name.replace(b"-", b"").isalnum()) and len(name) <= _PLAIN_NAME_MAX:
        return StreamKey(bucket, name.decode())  # streams of a bucket share its name
    plain = _PLAIN.fullmatch(path.decode("latin-1"))
    if plain is None:
        return None
    bucket, stream = plain.groups(DEFAULT_BUCKET)
    if len(_buckets) == _BUCKETS_MAX:
        _buckets.clear()
    return StreamKey(_buckets.setdefault(before, bucket), stream)


def stream_key_of(path: bytes) -> StreamKey:
    """The stream that a URL path names, in either form."""
    plain = plain_key_of(path)
    if plain is not None:
        return plain
    if path.startswith(V1_ROOT):
        return parse_v1_path(decode_segment(path[len(V1_ROOT) :]))
    segments = path.removeprefix(b"/").split(b"/")
    if len(segments) != 2:
        raise InvalidRequest("the path names no stream", code="invalid_path", hint="use /{bucket}/{stream}")
    return parse_bucketed(decode_segment(segments[0]), decode_segment(segments[1]))
