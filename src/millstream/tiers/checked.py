"""Small objects that are read whole, with a digest in front of them: manifests, notes, owners.

    4 bytes   "MSO1"
    16 bytes  BLAKE2b of what follows
    …         the content

The digest is verified whenever the object is read, and names the object's content: a manifest refers to the one before
it by this digest.
"""

from __future__ import annotations

from hashlib import blake2b
from typing import Final, NamedTuple

from millstream.errors import Corrupt

_MAGIC: Final = b"MSO1"
_DIGEST_BYTES: Final = 16
_HEAD_BYTES: Final = len(_MAGIC) + _DIGEST_BYTES


class Checked(NamedTuple):
    content: bytes | memoryview
    digest: bytes


def seal(content: bytes) -> bytes:
    """An object of this content."""
    return _MAGIC + digest_of(content) + content


def unseal(data: bytes, path: str) -> Checked:
    """An object's content, which is exactly what was sealed, and its digest."""
    if not data.startswith(_MAGIC):
        raise Corrupt(f"the object {path} is damaged: it does not begin as such objects do", code="object_damaged")
    content = memoryview(data)[_HEAD_BYTES:]
    digest = data[len(_MAGIC) : _HEAD_BYTES]
    if digest_of(content) != digest:
        raise Corrupt(f"the object {path} is damaged: its content does not match its digest", code="object_damaged")
    return Checked(content, digest)


def sealed_digest(data: bytes) -> bytes:
    """The digest in the head of an object that was just sealed."""
    return data[len(_MAGIC) : _HEAD_BYTES]


def digest_of(content: bytes | memoryview) -> bytes:
    return blake2b(content, digest_size=_DIGEST_BYTES).digest()
