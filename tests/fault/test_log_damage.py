"""A torn log tail is cut and reported; damage in the middle stops the start and names file and byte."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import httpx
import pytest

from millstream.log.frames import SEGMENT_HEADER_BYTES, decode_frame, decode_segment_header
from support.server import PYTHON, ServerProcess

PATH = "/v1/stream/damage/stream"
TEXT = {"content-type": "text/plain"}
MESSAGES = [b"message %d;" % number for number in range(20)]


@pytest.fixture(scope="module")
def killed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The data of a server that was killed after twenty appends, before anything was flushed."""
    directory = tmp_path_factory.mktemp("killed") / "data"
    with (
        ServerProcess(directory, settings=("cold.flush_interval=1h",)) as server,
        httpx.Client(base_url=server.url) as client,
    ):
        assert client.put(PATH, headers=TEXT).status_code == 201
        for message in MESSAGES:
            assert client.post(PATH, content=message, headers=TEXT).status_code == 204
        server.kill()
    return directory


@pytest.fixture
def data_dir(killed: Path, tmp_path: Path) -> Path:
    """A copy of that data, to be damaged."""
    return Path(shutil.copytree(killed, tmp_path / "data"))


def last_log(data_dir: Path) -> Path:
    return max(data_dir.rglob("*.log"))


def frames(content: bytes) -> list[int]:
    """Where the frames of a segment start."""
    header = decode_segment_header(content)
    assert header is not None
    starts, at = [], SEGMENT_HEADER_BYTES
    while (found := decode_frame(memoryview(content), at, header.salt)) is not None:
        starts.append(at)
        at = found[1]
    return starts


def refusal(data_dir: Path) -> str:
    """What a server says that does not start."""
    run = subprocess.run(
        [PYTHON, "-m", "millstream.cli.main", "serve", "--listen", "127.0.0.1:0", "--data-dir", str(data_dir)],
        capture_output=True,
        text=True,
        timeout=30,
    )
    assert (run.returncode, run.stdout) == (1, "")
    assert "Traceback" not in run.stderr
    return run.stderr


def assert_serves(data_dir: Path, expected: list[bytes]) -> str:
    """The server starts, holds exactly these messages, and takes more. Returns what it says."""
    with ServerProcess(data_dir) as server, httpx.Client(base_url=server.url) as client:
        assert client.get(PATH).content == b"".join(expected)
        assert client.post(PATH, content=b"more", headers=TEXT).status_code == 204
        assert client.get(PATH).content == b"".join([*expected, b"more"])
        server.kill()
        said = server.stderr()
        server.start()
        assert client.get(PATH).content == b"".join([*expected, b"more"])
        assert server.stop() == 0
    return said


@pytest.mark.parametrize("cut_bytes", [1, 5, 30])
def test_torn_last_frame_is_cut_and_reported(data_dir: Path, cut_bytes: int) -> None:
    path = last_log(data_dir)
    written = path.read_bytes().rstrip(b"\0")
    path.write_bytes(written[:-cut_bytes])
    said = assert_serves(data_dir, MESSAGES[:-1])
    assert re.search(rf"torn.*{path.name} at byte \d+", said)


def test_last_frame_of_zeros_is_an_end_like_any_other(data_dir: Path) -> None:
    path = last_log(data_dir)
    content = path.read_bytes()
    start = frames(content)[-1]
    path.write_bytes(content[:start] + bytes(len(content) - start))
    said = assert_serves(data_dir, MESSAGES[:-1])
    assert "torn" not in said


def test_garbage_behind_the_last_frame_is_cut_and_reported(data_dir: Path) -> None:
    path = last_log(data_dir)
    content = path.read_bytes().rstrip(b"\0")
    magic = content[frames(content)[-1] :][:4]
    path.write_bytes(content + magic + b"\x10\x00\x00\x00 half a header and more")
    assert "torn" in assert_serves(data_dir, MESSAGES)


@pytest.mark.parametrize("where", ["header", "magic", "length", "payload"])
def test_flipped_byte_before_valid_frames_refuses_to_start_and_names_the_place(data_dir: Path, where: str) -> None:
    path = last_log(data_dir)
    content = bytearray(path.read_bytes())
    payload = content.index(MESSAGES[7])
    frame = max(start for start in frames(bytes(content)) if start < payload)
    at, reported = {
        "header": (20, 0),
        "magic": (frame, frame),
        "length": (frame + 4, frame),
        "payload": (payload, frame),
    }[where]
    content[at] ^= 0x40
    path.write_bytes(content)
    said = refusal(data_dir)
    assert f"{path} at byte {reported}" in said
    assert "hint:" in said
    # Refusing changes nothing: the operator can still repair the file.
    assert path.read_bytes() == bytes(content)


def test_missing_log_with_a_catalog_that_needs_it_refuses_to_start(tmp_path: Path) -> None:
    directory = tmp_path / "data"
    with ServerProcess(directory) as server, httpx.Client(base_url=server.url) as client:
        assert client.put(PATH, content=b"kept", headers=TEXT).status_code == 201
        assert server.stop() == 0
    path = last_log(directory)
    kept = path.read_bytes()
    path.unlink()
    assert "log is missing" in refusal(directory)
    path.write_bytes(kept)
    with ServerProcess(directory) as server, httpx.Client(base_url=server.url) as client:
        assert client.get(PATH).content == b"kept"


def test_damage_in_an_earlier_segment_refuses_to_start_and_names_that_segment(tmp_path: Path) -> None:
    directory = tmp_path / "data"
    with (
        ServerProcess(directory, settings=("log.segment_bytes=16KiB", "cold.flush_interval=1h")) as server,
        httpx.Client(base_url=server.url) as client,
    ):
        assert client.put(PATH, headers=TEXT).status_code == 201
        for _ in range(30):
            assert client.post(PATH, content=b"x" * 2000, headers=TEXT).status_code == 204
        server.kill()
    first, second, *_ = sorted(directory.rglob("*.log"))
    content = first.read_bytes()
    # The last frame of a segment that has a successor was acknowledged: cut, it is damage and not a torn tail.
    first.write_bytes(content.rstrip(b"\0")[:-5])
    assert f"{first} at byte" in refusal(directory)
    first.write_bytes(content)
    second.rename(second.with_suffix(".lost"))
    assert "starts at position" in refusal(directory)
