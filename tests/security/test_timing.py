"""Secrets are compared in constant time: shown by what the comparisons are given, since time itself proves little."""

from __future__ import annotations

import hmac
from pathlib import Path

import pytest

from millstream.access.jwt import JwtRules, JwtVerifier, read_jwks
from millstream.access.token_file import read_tokens
from millstream.errors import Unauthorized
from support.access import Issuer, make_token


def test_secrets_are_compared_in_constant_time_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every way to be wrong, and being right, reaches `hmac.compare_digest` with two values of the same length."""
    compared: list[tuple[int, int]] = []
    genuine = hmac.compare_digest

    def noting(one: str | bytes, other: str | bytes) -> bool:
        compared.append((len(one), len(other)))
        return genuine(one, other)

    # The module is shared: PyJWT compares with the same function.
    monkeypatch.setattr(hmac, "compare_digest", noting)
    token = make_token(tmp_path / "tokens.json", "read:a")
    tokens = read_tokens(tmp_path / "tokens.json")
    wrong_id, wrong_secret = token.replace(token[4:16], "0" * 12), token[:-2] + "AA"
    for shown in (token, wrong_id, wrong_secret, "mst_", "nonsense"):
        compared.clear()
        tokens.find(shown)
        assert compared == [(64, 64)], shown
    issuer = Issuer()
    verifier = JwtVerifier(read_jwks(b'{"keys": [{"kty": "oct", "k": "%b"}]}' % (b"A" * 43), "keys"), JwtRules())
    compared.clear()
    with pytest.raises(Unauthorized):
        verifier.verify(issuer.sign({"sub": "a"}, "HS256"), 0)
    assert compared == [(32, 32)]
