"""Webhooks: how they are signed."""

from __future__ import annotations

import hashlib
from base64 import urlsafe_b64encode

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat


def _base64url(data: bytes) -> str:
    return urlsafe_b64encode(data).rstrip(b"=").decode()


class WebhookSigner:
    """Signs deliveries with one Ed25519 key and publishes its public half as a JWK."""

    def __init__(self, seed: bytes) -> None:
        self._key = Ed25519PrivateKey.from_private_bytes(seed)
        x = _base64url(self._key.public_key().public_bytes(Encoding.Raw, PublicFormat.Raw))
        # RFC 7638: the thumbprint of the required members in lexical order names the key.
        thumbprint = hashlib.sha256(f'{{"crv":"Ed25519","kty":"OKP","x":"{x}"}}'.encode()).digest()
        self.key_id = f"ds_{_base64url(thumbprint)}"
        self.jwk = {"kty": "OKP", "crv": "Ed25519", "x": x, "kid": self.key_id, "use": "sig", "alg": "EdDSA"}

    def signature_header(self, timestamp_seconds: int, body: bytes) -> str:
        signature = self._key.sign(b"%d.%b" % (timestamp_seconds, body))
        return f"t={timestamp_seconds},kid={self.key_id},ed25519={_base64url(signature)}"
