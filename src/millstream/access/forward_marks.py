"""The mark on a request that one node forwards to another: the client's address, signed with the cluster's key.

Limits count clients by address, but a forwarded request arrives from the forwarding node's address. So that node states
the client's address and signs it with a key that only the nodes have. A list of the nodes' addresses would not do: it
would be wrong behind NAT, and any other process at such an address could claim any client address.

    {node} {the client's address} {base64url(HMAC-SHA256 of everything before the last space)}

A node that does not have the key yet sends only its number. Marks are sent to nodes only, never to clients.
"""

from __future__ import annotations

import hmac
from base64 import urlsafe_b64encode
from typing import Final

MARK: Final = b"millstream-forwarded"
# The cluster's key signs other things too. This prefix prevents that one of those is accepted as a mark.
_PURPOSE: Final = b"millstream forwarded request 1"


def make_mark(secret: bytes | None, node: int, address: str) -> bytes:
    if secret is None:
        return b"%d" % node
    signed = b"%d %b" % (node, address.encode())
    return signed + b" " + _signature(secret, signed)


def address_in(secret: bytes | None, mark: bytes) -> str | None:
    """The client's address if a node of this cluster signed the mark; None for a mark that anybody could have made."""
    signed, _, signature = mark.rpartition(b" ")
    if secret is None or not hmac.compare_digest(_signature(secret, signed), signature):
        return None
    return signed.partition(b" ")[2].decode()


def _signature(secret: bytes, signed: bytes) -> bytes:
    key = hmac.digest(secret, _PURPOSE, "sha256")
    return urlsafe_b64encode(hmac.digest(key, signed, "sha256")).rstrip(b"=")
