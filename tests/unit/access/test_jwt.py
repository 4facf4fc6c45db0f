"""JWTs: the four algorithms, the claims, and the ways to cheat."""

from __future__ import annotations

import hmac
import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from millstream.access.jwt import JwtRules, JwtVerifier, read_jwks
from millstream.access.scopes import Scope
from millstream.errors import ConfigurationError, Unauthorized
from support.access import Issuer, b64

NOW_S = 1_800_000_000
NOW_MS = NOW_S * 1000
ISSUER = Issuer()
RULES = JwtRules(issuer="https://issuer.example", audience="millstream", leeway_ms=5000)
CLAIMS = {
    "iss": "https://issuer.example",
    "aud": "millstream",
    "sub": "ada",
    "exp": NOW_S + 60,
    "nbf": NOW_S - 60,
    "scope": "openid read:team-a write:team-a/chat/",
}


def verifier(rules: JwtRules = RULES, jwks: dict[str, Any] | None = None) -> JwtVerifier:
    return JwtVerifier(read_jwks(json.dumps(jwks or ISSUER.jwks()).encode(), "keys"), rules)


def refusal(token: str, rules: JwtRules = RULES, now_ms: int = NOW_MS) -> str:
    with pytest.raises(Unauthorized) as caught:
        verifier(rules).verify(token, now_ms)
    assert caught.value.code == "invalid_token"
    return caught.value.message


@pytest.mark.parametrize("with_kid", [True, False])
@pytest.mark.parametrize(
    ("algorithm", "kid"), [("HS256", "shared"), ("RS256", "rsa"), ("ES256", "p256"), ("EdDSA", "ed")]
)
def test_each_algorithm_verifies_and_yields_subject_scopes_and_expiry(algorithm: str, kid: str, with_kid: bool) -> None:
    token = ISSUER.sign(CLAIMS, algorithm, **({"kid": kid} if with_kid else {}))
    principal = verifier().verify(token, NOW_MS)
    assert principal.name == "ada"
    assert principal.scopes == (Scope("read", "team-a"), Scope("write", "team-a", "chat/"))
    assert principal.expires_at_ms == (NOW_S + 60) * 1000 + 5000


@pytest.mark.parametrize(
    "algorithm", ["none", "None", "NONE", "", None, "HS512", "ES256", "ES384", "PS256", ["EdDSA"], {}]
)
def test_no_algorithm_or_an_unknown_one_is_refused(algorithm: object) -> None:
    head = b64(json.dumps({"alg": algorithm}).encode())
    body = b64(json.dumps(CLAIMS).encode())
    for signature in ("", b64(b"x" * 64)):
        refusal(f"{head}.{body}.{signature}")


def test_a_public_key_used_as_a_shared_secret_is_refused() -> None:
    """The classic confusion: HS256 with the RSA key's public bytes as the secret."""
    head = b64(json.dumps({"alg": "HS256", "kid": "rsa"}).encode())
    signed = f"{head}.{b64(json.dumps(CLAIMS).encode())}"
    forged = hmac.digest(ISSUER.rsa_public_pem(), signed.encode(), "sha256")
    assert "no key fits" in refusal(f"{signed}.{b64(forged)}")


def test_a_key_id_of_another_algorithm_is_refused() -> None:
    assert "no key fits" in refusal(ISSUER.sign(CLAIMS, "EdDSA", kid="rsa"))
    assert "no key fits" in refusal(ISSUER.sign(CLAIMS, "EdDSA", kid="unknown"))


def test_a_key_that_the_token_brings_itself_is_not_used() -> None:
    stranger = Issuer()
    token = stranger.sign(CLAIMS, "EdDSA", kid="ed", jwk=stranger.jwks()["keys"][2], jku="http://127.0.0.1/jwks")
    assert "signature" in refusal(token)


@pytest.mark.parametrize("algorithm", ["HS256", "RS256", "ES256", "EdDSA"])
def test_any_flipped_bit_of_the_signed_part_is_refused(algorithm: str) -> None:
    token = ISSUER.sign(CLAIMS, algorithm)
    head, body, signature = token.split(".")
    claims = b64(json.dumps({**CLAIMS, "scope": "admin:*"}).encode())
    refusal(f"{head}.{claims}.{signature}")
    refusal(f"{head}.{body}.{signature[:-4]}")
    refusal(f"{head}.{body}.")


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"exp": NOW_S - 6}, "expired"),
        ({"exp": None}, "never expires"),
        ({"exp": "soon"}, "not a time"),
        ({"exp": True}, "not a time"),
        ({"exp": 1e300}, "not a time"),
        ({"exp": 10**400}, "not a time"),
        ({"exp": float("nan")}, "not a time"),
        ({"exp": float("inf")}, "not a time"),
        ({"nbf": -float("inf")}, "not a time"),
        ({"nbf": NOW_S + 6}, "not valid yet"),
        ({"iss": "https://other.example"}, "issuer"),
        ({"iss": None}, "issuer"),
        ({"aud": "other"}, "somebody else"),
        ({"aud": None}, "somebody else"),
        ({"aud": ["a", "b"]}, "somebody else"),
        ({"sub": ""}, "no subject"),
        ({"sub": "a\nb"}, "no subject"),
        ({"sub": 7}, "no subject"),
        ({"scope": 7}, "scopes"),
        ({"scope": [7]}, "scopes"),
    ],
)
def test_claims_that_are_wrong_are_refused(change: dict[str, object], reason: str) -> None:
    claims = {name: value for name, value in {**CLAIMS, **change}.items() if value is not None}
    assert reason in refusal(ISSUER.sign(claims))


def test_times_within_the_leeway_are_accepted() -> None:
    verifier().verify(ISSUER.sign({**CLAIMS, "exp": NOW_S - 4, "nbf": NOW_S + 4}), NOW_MS)


def test_an_audience_among_several_and_a_list_of_scopes_are_accepted() -> None:
    claims = {**CLAIMS, "aud": ["other", "millstream"], "scope": ["read:team-a"]}
    assert verifier().verify(ISSUER.sign(claims), NOW_MS).scopes == (Scope("read", "team-a"),)


def test_a_token_for_an_audience_is_refused_where_none_is_configured() -> None:
    assert "somebody else" in refusal(ISSUER.sign(CLAIMS), JwtRules(issuer=RULES.issuer))


@pytest.mark.parametrize("header", [{"crit": ["exp"]}, {"crit": ["b64"], "b64": True}, {"crit": []}, {"crit": "exp"}])
def test_a_critical_extension_is_refused(header: dict[str, Any]) -> None:
    assert "extension" in refusal(ISSUER.sign(CLAIMS, **header))


@pytest.mark.parametrize("header", [{"kid": 7}, {"kid": ["ed"]}, {"b64": False}])
def test_a_header_that_is_malformed_is_refused(header: dict[str, Any]) -> None:
    refusal(ISSUER.sign(CLAIMS, **header))


@pytest.mark.parametrize("body", ["", "[]", "7", "{", "[" * 5000, '{"exp": ' + "9" * 5000 + "}", "\ud800"])
def test_claims_that_are_no_json_object_are_refused(body: str) -> None:
    head = b64(json.dumps({"alg": "EdDSA", "kid": "ed"}).encode())
    signed = f"{head}.{b64(body.encode(errors='surrogatepass'))}"
    assert "not a JWT" in refusal(f"{signed}.{b64(ISSUER.signature('EdDSA', signed.encode()))}")


@given(st.text(max_size=60))
def test_nonsense_is_refused_and_never_repeated(text: str) -> None:
    message = refusal(text)
    assert len(text) < 4 or text not in message


def test_a_token_that_is_too_long_is_refused() -> None:
    assert "too long" in refusal(ISSUER.sign({**CLAIMS, "padding": "x" * 9000}))


@pytest.mark.parametrize(
    "jwks",
    [
        b"",
        b"[]",
        b'{"keys": {}}',
        b'{"keys": [{"kty": "oct", "k": "c2hvcnQ"}]}',
        b'{"keys": [{"kty": "oct"}]}',
        b'{"keys": [{"kty": "RSA", "n": "AQAB", "e": "AQAB"}]}',
        b'{"keys": [{"kty": "OKP", "crv": "Ed25519", "x": "AQAB"}]}',
        b'{"keys": [{"kty": "oct", "k": "!!!!"}]}',
        b'{"keys": [{"kty": "oct", "k": "AAECAwQFBgcICQoLDA0ODxAREhMUFRYXGBkaGxwdHh8gISIj+/=="}]}',
        b'{"keys": [{"kty": "oct", "k": ["AQAB"]}]}',
        b'{"keys": [{"kty": ["oct"], "k": "AQAB"}]}',
        b'{"keys": [{"kty": "EC", "crv": "P-256"}]}',
        b'{"keys": [{"kty": "EC", "crv": "P-256", "x": "AQAB", "y": "AQAB"}]}',
    ],
)
def test_a_key_set_that_is_malformed_or_weak_is_refused(jwks: bytes) -> None:
    with pytest.raises(ConfigurationError, match="keys"):
        read_jwks(jwks, "keys")


def test_keys_for_other_uses_and_algorithms_are_skipped() -> None:
    others = [
        {"kty": "EC", "crv": "P-384"},
        {"kty": "OKP", "crv": "X25519"},
        {"kty": "new"},
        {**ISSUER.jwks()["keys"][1], "alg": "PS256"},
    ]
    encryption = {**ISSUER.jwks()["keys"][1], "use": "enc"}
    assert read_jwks(json.dumps({"keys": [*others, encryption]}).encode(), "keys") == []


def test_a_point_that_is_not_on_the_curve_is_refused() -> None:
    key = ISSUER.jwks()["keys"][3]
    with pytest.raises(ConfigurationError) as caught:
        read_jwks(json.dumps({"keys": [{**key, "y": key["x"]}]}).encode(), "keys")
    assert key["x"] not in caught.value.message


def test_a_key_that_would_pass_for_another_kind_is_refused_when_it_is_read() -> None:
    key = {"kty": "oct", "k": b64(ISSUER.rsa_public_pem())}
    with pytest.raises(ConfigurationError, match="key number 0"):
        read_jwks(json.dumps({"keys": [key]}).encode(), "keys")


def test_a_key_of_too_many_bits_is_refused() -> None:
    key = {"kty": "RSA", "e": "AQAB", "n": b64(b"\xff" * 2049)}
    with pytest.raises(ConfigurationError, match="bits"):
        read_jwks(json.dumps({"keys": [key]}).encode(), "keys")


def test_a_private_key_verifies_what_it_signed() -> None:
    keys = ISSUER.jwks()["keys"]
    private = [
        {**keys[1], "d": "AQAB"},
        {**keys[2], "d": b64(ISSUER.ed25519.private_bytes_raw())},
        {**keys[3], "d": "AQ"},
    ]
    for algorithm in ("RS256", "EdDSA", "ES256"):
        assert verifier(jwks={"keys": private}).verify(ISSUER.sign(CLAIMS, algorithm), NOW_MS).name == "ada"
