"""multipart/mixed bodies (RFC 2046 §5.1): one part per message, payloads untouched.

The boundary is long and random, so that no payload holds it but by guessing 128 bits.
"""

from __future__ import annotations

from collections.abc import Iterable


def boundary_from(random: bytes) -> str:
    return f"millstream-{random.hex()}"


def part_head(boundary: str, content_type: str, *, is_first: bool = False) -> bytes:
    """What stands before a part's payload. The line break before a boundary belongs to the boundary."""
    return b"%b--%b\r\nContent-Type: %b\r\n\r\n" % (
        b"" if is_first else b"\r\n",
        boundary.encode(),
        content_type.encode("latin-1"),
    )


def encode_parts(boundary: str, content_type: str, payloads: Iterable[bytes | memoryview]) -> bytes:
    """Parts that all have one content type and follow an earlier part."""
    head = part_head(boundary, content_type)
    return b"".join([piece for payload in payloads for piece in (head, payload)])


def closing(boundary: str) -> bytes:
    return b"\r\n--%b--" % boundary.encode()


def decode_parts(boundary: str, body: bytes) -> list[tuple[str, bytes]]:
    """The parts of a whole body, each with its content type; ValueError if it is cut short or malformed."""
    delimiter = b"\r\n--" + boundary.encode()
    pieces = (b"\r\n" + body).split(delimiter)
    if len(pieces) < 2 or pieces[0] or not pieces.pop().startswith(b"--"):
        raise ValueError("the multipart body has no end")
    parts: list[tuple[str, bytes]] = []
    for piece in pieces[1:]:
        head, separator, payload = piece.partition(b"\r\n\r\n")
        if not separator or not head.startswith(b"\r\n"):
            raise ValueError("a part of the multipart body has no head")
        content_type = "application/octet-stream"
        for line in head[2:].split(b"\r\n"):
            name, _, value = line.partition(b":")
            if name.strip().lower() == b"content-type":
                content_type = value.strip().decode("latin-1")
        parts.append((content_type, payload))
    return parts
