"""The mark on a request that one node passes on to another: whose request it is, vouched for with the cluster's key.

Limits count clients by address, and what is passed on arrives from the passing node's. So that node says whose request
it is and signs it with a key that every node has and nobody else. That needs no list of addresses, which would be wrong
behind NAT, and which everything else at such an address could hide behind.

    {node} {the client's address} {base64url(HMAC-SHA256 of what stands before the last space)}

A node that does not have the key yet sends only its number. A mark goes from node to node and to nobody else.
"""

from __future__ import annotations

import hmac
from base64 import urlsafe_b64encode
from typing import Final

MARK: Final = b"millstream-forwarded"
# The cluster's key signs other things as well; nothing that it signs there may pass for one of these.
_PURPOSE: Final = b"millstream forwarded request 1"


def make_mark(secret: bytes | None, node: int, address: str) -> bytes:
    if secret is None:
        return b"%d" % node
    signed = b"%d %b" % (node, address.encode())
    return signed + b" " + _signature(secret, signed)


def address_in(secret: bytes | None, mark: bytes) -> str | None:
    """The client's address, if a node of this cluster says it; None for a mark that anybody could have made."""
    signed, _, signature = mark.rpartition(b" ")
    if secret is None or not hmac.compare_digest(_signature(secret, signed), signature):
        return None
    return signed.partition(b" ")[2].decode()


def _signature(secret: bytes, signed: bytes) -> bytes:
    key = hmac.digest(secret, _PURPOSE, "sha256")
    return urlsafe_b64encode(hmac.digest(key, signed, "sha256")).rstrip(b"=")
