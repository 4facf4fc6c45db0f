"""The token file: what it keeps, what it never holds, and what becomes of a bad one."""

from __future__ import annotations

import hashlib
import json
import stat
import threading
from pathlib import Path

import pytest

from millstream.access.scopes import Scope
from millstream.access.token_file import create_token, read_tokens, revoke_token
from millstream.clock import SystemClock
from millstream.errors import ConfigurationError, NotFound

SCOPES = [Scope("read", "team-a"), Scope("write", "team-a", "chat/")]


def test_a_token_is_found_again_with_its_scopes_name_and_expiry(tmp_path: Path) -> None:
    path = tmp_path / "tokens.json"
    entry, token = create_token(path, SystemClock(), "ada", SCOPES, 123)
    principal = read_tokens(path).find(token)
    assert principal is not None
    assert (principal.key, principal.name, principal.scopes) == (f"token:{entry.id}", "ada", tuple(SCOPES))
    assert principal.expires_at_ms == 123


def test_the_file_holds_the_hash_and_not_the_secret_and_is_the_owners_alone(tmp_path: Path) -> None:
    path = tmp_path / "tokens.json"
    entry, token = create_token(path, SystemClock(), "", SCOPES, None)
    secret = token.removeprefix(f"mst_{entry.id}_")
    assert len(secret) == 43  # 256 bits
    for file in tmp_path.iterdir():
        assert secret not in file.read_text()
        assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert json.loads(path.read_text())["tokens"][0]["sha256"] == hashlib.sha256(secret.encode()).hexdigest()


def test_no_two_tokens_are_alike(tmp_path: Path) -> None:
    path = tmp_path / "tokens.json"
    tokens = {create_token(path, SystemClock(), "", SCOPES, None)[1] for _ in range(50)}
    assert len({token.split("_", 2)[2] for token in tokens}) == 50


@pytest.mark.parametrize("change", ["secret", "id", "short", "long", "other prefix", "empty"])
def test_a_token_that_differs_anywhere_is_not_found(tmp_path: Path, change: str) -> None:
    path = tmp_path / "tokens.json"
    _, token = create_token(path, SystemClock(), "", SCOPES, None)
    altered = {
        "secret": token[:-1] + ("A" if token[-1] != "A" else "B"),
        "id": token.replace(token[4:16], "0" * 12),
        "short": token[:-1],
        "long": token + "A",
        "other prefix": "xyz_" + token[4:],
        "empty": "",
    }[change]
    assert read_tokens(path).find(altered) is None


def test_a_revoked_token_is_gone_and_the_others_stay(tmp_path: Path) -> None:
    path = tmp_path / "tokens.json"
    first, first_token = create_token(path, SystemClock(), "first", SCOPES, None)
    _, second_token = create_token(path, SystemClock(), "second", SCOPES, None)
    revoke_token(path, first.id)
    assert read_tokens(path).find(first_token) is None
    assert read_tokens(path).find(second_token) is not None
    with pytest.raises(NotFound):
        revoke_token(path, first.id)


def test_tokens_made_at_the_same_time_are_all_kept(tmp_path: Path) -> None:
    path = tmp_path / "tokens.json"

    def make() -> None:
        for _ in range(10):
            create_token(path, SystemClock(), "", SCOPES, None)

    threads = [threading.Thread(target=make) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(read_tokens(path).entries) == 40


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"{}",
        b"[]",
        b"\xff",
        b'{"version":2,"tokens":[]}',
        b'{"version":1,"tokens":[{"id":1}]}',
        b'{"version":1,"tokens":[{"id":"a","name":"","sha256":"","scopes":["all"],"created_at_ms":0}]}',
    ],
)
def test_a_file_that_is_none_is_refused_by_name(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "tokens.json"
    path.write_bytes(content)
    with pytest.raises(ConfigurationError, match=str(path)):
        read_tokens(path)


def test_no_file_is_no_tokens(tmp_path: Path) -> None:
    assert read_tokens(tmp_path / "none").entries == {}
