"""`millstream streams`, `buckets`, `snapshot` and `status` on a real server."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from millstream.client import Client, Unavailable
from support.commands import json_of, millstream, output_of
from support.server import ServerProcess

START = "0000000000000000_0000000000000000"


def test_a_json_stream_from_creation_to_deletion(url: str, bucket: str, tmp_path: Path) -> None:
    name = f"{bucket}/run"
    created = json_of("streams", "create", name, "--json-messages", url=url)
    assert created["is_new"] and created["next_offset"] == START
    assert "exists already" in output_of("streams", "create", name, "--json-messages", url=url)
    first = output_of("streams", "append", name, "-", url=url, stdin=b'{"step": 1}\n').strip()
    (tmp_path / "more.json").write_text('["two",\n 3]')
    output_of("streams", "append", name, "--file", str(tmp_path / "more.json"), url=url)
    output_of("streams", "append", name, '{"a":\n4}', url=url)
    assert output_of("streams", "read", name, url=url) == '{"step": 1}\n"two"\n3\n{"a": 4}\n'
    assert output_of("streams", "read", name, "--offset", first, url=url) == '"two"\n3\n{"a": 4}\n'
    info = json_of("streams", "head", name, url=url)
    chunk = json_of("streams", "read", name, url=url)
    assert chunk == {"messages": [{"step": 1}, "two", 3, {"a": 4}], "next_offset": info["next_offset"]}
    assert json_of("streams", "append", name, "--close", url=url)["closed"] is True
    assert "closed" in output_of("streams", "head", name, url=url)
    output_of("streams", "rm", name, url=url)
    assert millstream("streams", "head", name, url=url).returncode == 3


def test_bytes_pass_unchanged(url: str, bucket: str, tmp_path: Path) -> None:
    name, data = f"{bucket}/blob", bytes(range(256)) * 10_000
    output_of("streams", "create", name, "--data", "-", url=url, stdin=data[:1000])
    (tmp_path / "rest").write_bytes(data[1000:])
    output_of("streams", "append", name, "--file", str(tmp_path / "rest"), url=url)
    assert millstream("streams", "read", name, url=url).stdout == data
    output_of("streams", "read", name, "-o", str(tmp_path / "copy"), url=url)
    assert (tmp_path / "copy").read_bytes() == data


def test_each_line_becomes_a_message(url: str, bucket: str, tmp_path: Path) -> None:
    name = f"{bucket}/lines"
    output_of("streams", "create", name, "--json-messages", url=url)
    lines = "".join(f'{{"n": {number}}}\n\n' for number in range(5000))
    appended = json_of("streams", "append", name, "-", "--lines", url=url, stdin=lines.encode())
    assert appended["messages"] == 5000
    shown = output_of("streams", "read", name, url=url).splitlines()
    assert [json.loads(line)["n"] for line in shown] == list(range(5000))
    (tmp_path / "bad").write_text("1\n2\n{nonsense\n4\n")
    refused = millstream("streams", "append", name, "--lines", "--file", str(tmp_path / "bad"), url=url)
    assert refused.returncode == 1 and b"line 3 is not JSON" in refused.stderr
    assert b"the 2 messages before it were appended" in refused.stderr
    assert output_of("streams", "read", name, url=url).splitlines()[5000:] == ["1", "2"]


def test_lists_and_buckets(url: str, bucket: str) -> None:
    output_of("buckets", "create", bucket, url=url)
    assert millstream("buckets", "create", bucket, url=url).returncode == 1
    output_of("buckets", "create", bucket, "--exist-ok", url=url)
    for name in ("b", "a-1", "a-2"):
        output_of("streams", "create", f"{bucket}/{name}", "--content-type", "text/plain", "--closed", url=url)
    assert [entry["name"] for entry in json_of("streams", "ls", bucket, url=url)] == ["a-1", "a-2", "b"]
    table = output_of("streams", "ls", bucket, "--prefix", "a-", url=url).splitlines()
    assert table[0].split()[:2] == ["stream", "status"] and [line.split()[0] for line in table[1:]] == ["a-1", "a-2"]
    assert json_of("buckets", "show", bucket, url=url)["streams"] == 3
    assert bucket in output_of("buckets", "ls", url=url).splitlines()
    assert bucket in json_of("buckets", "ls", url=url)
    refused = millstream("buckets", "rm", bucket, url=url)
    assert refused.returncode == 1 and b"hint:" in refused.stderr
    output_of("streams", "rm", *(f"{bucket}/{name}" for name in ("b", "a-1", "a-2")), url=url)
    assert json_of("buckets", "rm", bucket, url=url) == {"deleted": bucket}
    assert bucket not in json_of("buckets", "ls", url=url)


def test_a_feed_is_one_json_object_a_line(url: str, bucket: str) -> None:
    output_of("buckets", "create", bucket, url=url)
    output_of("streams", "create", f"{bucket}/j", "--json-messages", "--data", "-", url=url, stdin=b"[1, {}]")
    output_of("streams", "create", f"{bucket}/b", "--data", "-", url=url, stdin=b"\0\xff")
    items = [json.loads(line) for line in output_of("buckets", "feed", bucket, url=url).splitlines()]
    assert [(item["stream"], item["event"]) for item in items] == [
        ("j", "created"),
        ("j", "message"),
        ("j", "message"),
        ("b", "created"),
        ("b", "message"),
    ]
    assert [item["message"] for item in items[1:3]] == [1, {}] and items[4]["base64"] == "AP8="


def test_forks(url: str, bucket: str) -> None:
    source = f"{bucket}/source"
    output_of("streams", "create", source, "--json-messages", "--data", "-", url=url, stdin=b"[1,2,3]")
    forked = json_of("streams", "fork", source, f"{bucket}/fork", "--offset", START, "--sub-offset", "2", url=url)
    assert forked["is_new"]
    assert output_of("streams", "read", f"{bucket}/fork", url=url) == "1\n2\n"


def test_snapshots(url: str, bucket: str, tmp_path: Path) -> None:
    name = f"{bucket}/doc"
    output_of("streams", "create", name, "--json-messages", url=url)
    assert json_of("snapshot", "ls", name, url=url) == []
    offset = output_of("streams", "append", name, "[1,2]", url=url).strip()
    output_of("snapshot", "publish", name, "-", "--offset", offset, url=url, stdin=b"state\0")
    assert json_of("snapshot", "ls", name, url=url) == [{"offset": offset, "up_to_date": True}]
    assert millstream("snapshot", "get", name, url=url).stdout == b"state\0"
    described = json_of("snapshot", "get", name, "-o", str(tmp_path / "out"), url=url)
    assert (described["offset"], described["size"]) == (offset, 6)
    assert (tmp_path / "out").read_bytes() == b"state\0"
    trimmed = millstream("streams", "read", name, url=url)
    assert trimmed.returncode == 3 and b"bootstrap" in trimmed.stderr
    refused = millstream("snapshot", "rm", name, offset, url=url)
    assert refused.returncode == 1 and b"publish a snapshot at a later offset" in refused.stderr


def test_status(url: str) -> None:
    assert json_of("status", url=url)["is_well"] is True
    shown = output_of("status", url=url)
    assert url in shown and "status               ok" in shown and "\033" not in shown


def test_status_of_a_server_that_takes_no_writes_says_why(tmp_path: Path) -> None:
    settings = ("hot.bytes_max=200KiB", "cold.flush_interval=1h", f"cold.path={tmp_path / 'cold'}")
    with ServerProcess(tmp_path / "data", settings=settings) as server, Client(server.url, retries=0) as client:
        assert client.readiness() == client.readiness(of_cluster=True) == (True, ())
        (tmp_path / "cold").rename(tmp_path / "away")
        (tmp_path / "cold").write_text("in the way")
        stream = client.stream("status/full")
        stream.create()
        with pytest.raises(Unavailable, match="memory"):
            for _ in range(4):
                stream.append(bytes(150 << 10))
        readiness = client.readiness()
        assert not readiness.is_ready and "writers are being refused" in readiness.problems[0]
        shown = millstream("status", url=server.url)
        assert shown.returncode == 1 and b"not well" in shown.stdout and readiness.problems[0].encode() in shown.stdout
        report = json.loads(millstream("status", "--json", url=server.url).stdout)
        assert (report["is_well"], report["is_ready"], report["is_cluster_ready"]) == (False, False, False)
        assert readiness.problems[0] in report["problems"]
