"""lib0 framing: how Yjs updates are laid end to end (Yjs protocol §7).

A frame is the length of an update as a variable-length unsigned integer, seven bits a byte and the lowest first, then
the update. Frames are concatenated with nothing between them, so joining framed bytes gives framed bytes.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from millstream.errors import InvalidRequest

# lib0 refuses numbers beyond 2^53 - 1, which take eight bytes.
VARUINT_BYTES_MAX: Final = 8


def encode_varuint(number: int) -> bytes:
    encoded = bytearray()
    while number > 0x7F:
        encoded.append(number & 0x7F | 0x80)
        number >>= 7
    encoded.append(number)
    return bytes(encoded)


def read_varuint(data: bytes, position: int) -> tuple[int, int]:
    """The number at a position, and the position behind it."""
    number = shift = 0
    for place in range(position, min(position + VARUINT_BYTES_MAX, len(data))):
        byte = data[place]
        number |= (byte & 0x7F) << shift
        if byte < 0x80:
            return number, place + 1
        shift += 7
    what = "is cut off" if position + VARUINT_BYTES_MAX > len(data) else f"takes more than {VARUINT_BYTES_MAX} bytes"
    raise _not_framed(f"the length at byte {position} {what}")


def frame_update(update: bytes) -> bytes:
    return encode_varuint(len(update)) + update


def frame_bounds(data: bytes) -> Iterator[tuple[int, int]]:
    """Where each update starts and ends; refuses bytes that are not whole frames."""
    position, size = 0, len(data)
    while position < size:
        start = position + 1
        length = data[position]
        if length > 0x7F:
            length, start = read_varuint(data, position)
        end = start + length
        if end > size:
            raise _not_framed(
                f"the update at byte {position} should have {length} bytes, {size - start} follow its length"
            )
        yield start, end
        position = end


def split_frames(data: bytes) -> list[bytes]:
    """The updates in framed bytes."""
    return [data[start:end] for start, end in frame_bounds(data)]


def check_updates(data: bytes) -> None:
    """Refuse what is not one or more framed updates. An update of no bytes is none: no Yjs client could apply it."""
    for start, end in frame_bounds(data):
        if start == end:
            raise _not_framed(f"the update at byte {start - 1} is empty")


def _not_framed(problem: str) -> InvalidRequest:
    return InvalidRequest(
        f"the body is not lib0-framed: {problem}",
        code="invalid_framing",
        hint="write each update with lib0's writeVarUint8Array: its length as a varuint, then its bytes",
    )
