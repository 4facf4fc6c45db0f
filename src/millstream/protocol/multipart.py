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
