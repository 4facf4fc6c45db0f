"""Blobs: spooled while they arrive, whole in the object store or not there, under names that are never reused."""

from __future__ import annotations

import asyncio
import zlib
from collections.abc import Coroutine
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from millstream.errors import NotFound
from millstream.protocol.keys import StreamKey
from millstream.streams.records import SnapshotRef
from millstream.tiers.blobs import Blobs, blob_name
from millstream.tiers.objects import ObjectStoreSettings, open_objects
from millstream.units import Offset

SECONDS = 20.0


@pytest.fixture(params=["fs", "memory"])
def blobs(request: pytest.FixtureRequest, tmp_path: Path) -> Blobs:
    objects = open_objects(ObjectStoreSettings(request.param, tmp_path / "store", {}))
    return Blobs(objects, tmp_path / "spool")


def run(main: Coroutine[Any, Any, None]) -> None:
    asyncio.run(asyncio.wait_for(main, SECONDS))


async def stored(blobs: Blobs, name: str, *chunks: bytes) -> None:
    upload = blobs.begin(name.encode())
    for chunk in chunks:
        upload.write(chunk)
    await blobs.commit(upload, name)


async def content(blobs: Blobs, name: str) -> bytes:
    data = await blobs._objects.get(f"snapshots/{name}")
    snapshot = SnapshotRef(Offset(0), "text/plain", name, len(data), zlib.crc32(data))
    return b"".join([piece async for piece in await blobs.open(snapshot)])


def spooled(tmp_path: Path) -> list[Path]:
    return list((tmp_path / "spool").iterdir())


def test_blob_is_the_chunks_that_were_written(blobs: Blobs, tmp_path: Path) -> None:
    chunks = [b"one", b"", b"\x00two\r\n", bytes(range(256)) * 10_000]
    whole = b"".join(chunks)

    async def main() -> None:
        upload = blobs.begin(b"random")
        for chunk in chunks:
            upload.write(chunk)
        assert (upload.size, upload.checksum) == (len(whole), zlib.crc32(whole))
        assert await blobs.names() == [], "it has no name before it is durable"
        await blobs.commit(upload, "name")
        assert await blobs.names() == ["name"]
        assert await content(blobs, "name") == whole
        assert spooled(tmp_path) == []

    run(main())


def test_empty_upload_is_an_empty_blob(blobs: Blobs) -> None:
    async def main() -> None:
        await stored(blobs, "empty")
        assert await blobs.names() == ["empty"]
        assert await content(blobs, "empty") == b""

    run(main())


def test_discarded_upload_leaves_nothing(blobs: Blobs, tmp_path: Path) -> None:
    upload = blobs.begin(b"random")
    upload.write(b"unwanted")
    assert len(spooled(tmp_path)) == 1
    upload.discard()
    upload.discard()
    assert spooled(tmp_path) == []


def test_discard_after_commit_leaves_the_blob(blobs: Blobs) -> None:
    async def main() -> None:
        upload = blobs.begin(b"random")
        upload.write(b"kept")
        await blobs.commit(upload, "name")
        upload.discard()
        assert await content(blobs, "name") == b"kept"

    run(main())


def test_two_uploads_with_the_same_chance_are_refused_rather_than_mixed(blobs: Blobs) -> None:
    upload = blobs.begin(b"same")
    with pytest.raises(FileExistsError):
        blobs.begin(b"same")
    upload.discard()


def test_uploads_at_the_same_time_do_not_mix(blobs: Blobs) -> None:
    async def main() -> None:
        uploads = {name: blobs.begin(name.encode()) for name in "abc"}
        for _ in range(10):
            for name, upload in uploads.items():
                upload.write(name.encode() * 1000)
        await asyncio.gather(*[blobs.commit(upload, name) for name, upload in uploads.items()])
        assert sorted(await blobs.names()) == ["a", "b", "c"]
        for name in "abc":
            assert await content(blobs, name) == name.encode() * 10_000

    run(main())


def test_copy_outlives_its_original(blobs: Blobs) -> None:
    async def main() -> None:
        await stored(blobs, "original", b"shared")
        await blobs.copy("original", "copy")
        await blobs.delete("original")
        assert await blobs.names() == ["copy"]
        assert await content(blobs, "copy") == b"shared"

    run(main())


def test_copy_or_read_of_a_blob_that_is_gone_is_not_found(blobs: Blobs) -> None:
    async def main() -> None:
        with pytest.raises(NotFound):
            await blobs.copy("gone", "copy")
        with pytest.raises(NotFound):
            await content(blobs, "gone")
        assert await blobs.names() == []

    run(main())


def test_delete_is_harmless_when_repeated(blobs: Blobs) -> None:
    async def main() -> None:
        await stored(blobs, "name", b"x")
        await blobs.delete("name")
        await blobs.delete("name")
        assert await blobs.names() == []

    run(main())


def test_uploads_that_a_crash_cut_off_are_removed_at_start_and_blobs_kept(tmp_path: Path) -> None:
    async def main() -> None:
        objects = open_objects(ObjectStoreSettings("fs", tmp_path / "store", {}))
        before = Blobs(objects, tmp_path / "deep" / "spool")
        await stored(before, "name", b"kept")
        upload = before.begin(b"cut off")
        upload.write(b"half")
        after = Blobs(objects, tmp_path / "deep" / "spool")
        assert list((tmp_path / "deep" / "spool").iterdir()) == []
        assert await after.names() == ["name"]
        assert await content(after, "name") == b"kept"
        upload.discard()

    run(main())


keys = st.builds(StreamKey, st.text(min_size=1, max_size=60), st.text(min_size=1, max_size=61))


@given(keys, st.integers(0, 10**16 - 1), st.binary(min_size=8, max_size=8))
def test_name_of_a_blob_is_a_plain_file_name_of_bounded_length(key: StreamKey, offset: int, random: bytes) -> None:
    name = blob_name(key, Offset(offset), random)
    assert "/" not in name and "\0" not in name and name not in (".", "..")
    assert name.isascii() and len(name) <= 255
    assert name.endswith(f"-{offset:016d}-{random.hex()}")


@given(keys, st.binary(min_size=8, max_size=8), st.binary(min_size=8, max_size=8))
def test_names_differ_as_their_chance_differs(key: StreamKey, one: bytes, other: bytes) -> None:
    assert (blob_name(key, Offset(5), one) == blob_name(key, Offset(5), other)) == (one == other)
