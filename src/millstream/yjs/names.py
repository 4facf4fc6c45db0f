"""The streams of a Yjs document, and the URL paths that name documents (Yjs protocol §4, §12.2)."""

from __future__ import annotations

from typing import Final, NamedTuple

from millstream.errors import InvalidRequest
from millstream.protocol.keys import DEFAULT_BUCKET, KEY_BYTES_MAX, RESERVED_BUCKETS, StreamKey, checked_key
from millstream.protocol.keys import decode_segment as decode_path

YJS_ROOT: Final = b"/v1/yjs/"
AWARENESS_DEFAULT: Final = "default"

_DOCUMENTS: Final = "docs"


class Document(NamedTuple):
    """A document of a service. Its streams are in the bucket that is named like the service."""

    service: str
    path: str

    def __str__(self) -> str:
        return f"{self.service}/{self.path}"

    @property
    def key(self) -> StreamKey:
        """The stream of the document's updates."""
        return StreamKey(self.service, f"{_DOCUMENTS}/{self.path}")

    def awareness_key(self, name: str) -> StreamKey:
        if not name or "/" in name or "\0" in name or name in (".", ".."):
            raise InvalidRequest(
                f"{name[:40]!r} is not the name of an awareness stream",
                hint="one or more characters without '/', such as default",
            )
        return checked_key(self.service, f"{self.awareness_prefix}{name}")

    @property
    def awareness_prefix(self) -> str:
        return f"awareness/{self.path}/"

    def owns_awareness(self, key: StreamKey) -> bool:
        """Whether a stream is an awareness stream of this document, and not of a document below it."""
        rest = key.stream.removeprefix(self.awareness_prefix)
        return key.bucket == self.service and rest != key.stream and "/" not in rest


def parse_document(path: bytes) -> Document:
    """The document that a URL path names. Repeated slashes count as one; `.` and `..` are refused, encoded or not."""
    segments = [segment for segment in decode_path(path[len(YJS_ROOT) :]).split("/") if segment]
    if "." in segments or ".." in segments:
        raise InvalidRequest("a document path has no '.' or '..' in it", hint="name the document by its plain path")
    if len(segments) < 3 or segments[1] != _DOCUMENTS:
        raise InvalidRequest("the path names no document", hint="use /v1/yjs/{service}/docs/{path}")
    service = segments[0]
    if service in RESERVED_BUCKETS or service == DEFAULT_BUCKET:
        raise InvalidRequest(f"{service!r} is a reserved name and no service", hint="choose another service name")
    document = Document(service, "/".join(segments[2:]))
    try:
        # Every document that can be edited needs awareness streams, so the longest usual awareness name must fit too.
        document.awareness_key(AWARENESS_DEFAULT)
    except InvalidRequest as error:
        room = KEY_BYTES_MAX - len(f"{service}/awareness//{AWARENESS_DEFAULT}".encode())
        size = len(document.path.encode())
        if size <= room:
            raise
        raise InvalidRequest(
            f"the document's path takes {size} bytes", hint=f"in service {service!r} at most {room} are allowed"
        ) from error
    return document
