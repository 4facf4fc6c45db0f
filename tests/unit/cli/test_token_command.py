"""`millstream token`: what it prints, what it keeps, and what it refuses."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from millstream.access.token_file import read_tokens
from millstream.cli.main import main


def run(directory: Path, *arguments: str) -> int:
    return main(["token", arguments[0], *arguments[1:], "--data-dir", str(directory)])


def test_a_token_is_made_listed_and_revoked(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code = run(tmp_path, "create", "--bucket", "team-a", "--read", "--write", "--name", "ada", "--expires", "30d")
    assert code == 0
    made = capsys.readouterr()
    token = made.out.strip()
    assert token.startswith("mst_") and "\n" not in token  # nothing else, so that a script can take it
    assert "read:team-a, write:team-a" in made.err
    principal = read_tokens(tmp_path / "tokens.json").find(token)
    assert principal is not None and principal.name == "ada"
    assert principal.expires_at_ms is not None
    assert run(tmp_path, "ls") == 0
    listed = capsys.readouterr().out
    token_id = principal.key.removeprefix("token:")
    assert token_id in listed and "ada" in listed and "read:team-a write:team-a" in listed
    assert token.removeprefix(f"mst_{token_id}_") not in listed
    assert run(tmp_path, "revoke", token_id) == 0
    assert read_tokens(tmp_path / "tokens.json").find(token) is None
    assert run(tmp_path, "revoke", token_id) == 3
    assert "token ls shows the ids" in capsys.readouterr().err


def test_buckets_and_prefixes_multiply(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["--bucket", "a", "--bucket", "b", "--prefix", "x/", "--prefix", "y/", "--read", "--json"]
    assert run(tmp_path, "create", *arguments) == 0
    made = json.loads(capsys.readouterr().out)
    assert made["scopes"] == ["read:a/x/", "read:a/y/", "read:b/x/", "read:b/y/"]
    assert made["expires_at_ms"] is None
    assert run(tmp_path, "ls", "--json") == 0
    assert [entry["id"] for entry in json.loads(capsys.readouterr().out)] == [made["id"]]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--read"], "--bucket NAME"),
        (["--bucket", "a"], "--read, --write or --admin"),
        (["--bucket", "a/b", "--read"], "is not a scope"),
        (["--bucket", "a b", "--read"], "is not a scope"),
        (["--bucket", "a", "--read", "--expires", "soon"], "is not a duration"),
        (["--bucket", "a", "--read", "--name", "two\nlines"], "printable"),
    ],
)
def test_what_makes_no_sense_is_refused_with_what_to_do(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], message: str
) -> None:
    assert run(tmp_path, "create", *arguments) == 1
    assert message in capsys.readouterr().err
    assert not (tmp_path / "tokens.json").exists()
