"""One contract for every object store: a local folder, memory, and a real S3 server (SeaweedFS)."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Coroutine
from pathlib import Path
from typing import Any

import pytest

from millstream.errors import ConfigurationError, NotFound, Unavailable
from millstream.tiers.objects import Objects, ObjectStoreSettings, open_objects
from support.s3 import S3Server, shared_s3_server

AWKWARD = (
    "segments/bucket=plain/date=2026-01-02/0000-00000000000000000001-ab.parquet",
    "segments/bucket=with%20space/date=2026-01-02/x.parquet",
    "segments/bucket=100%25/x.parquet",
    "segments/bucket=%C3%A9%2A%22%3C/x.parquet",
    "segments/bucket=~.-_/x.parquet",
    "snapshots/_default_a_b-0000000000000012-00ff",
)


@pytest.fixture(scope="module")
def s3_server() -> S3Server:
    return shared_s3_server()


@pytest.fixture(params=["fs", "memory", "s3"])
def objects(request: pytest.FixtureRequest, tmp_path: Path) -> Objects:
    if request.param == "s3":
        server: S3Server = request.getfixturevalue("s3_server")
        return open_objects(ObjectStoreSettings("s3", Path(server.new_prefix()), server.options))
    return open_objects(ObjectStoreSettings(request.param, tmp_path / "store", {}))


def run(work: Coroutine[Any, Any, Any]) -> Any:
    return asyncio.run(work)


async def paths(objects: Objects, prefix: str) -> set[str]:
    return {entry.path async for entry in objects.list(prefix)}


@pytest.mark.parametrize("size", [1, 1000, 5 << 20, 12 << 20])
def test_what_was_put_is_read_whole_in_ranges_and_in_pieces(objects: Objects, size: int) -> None:
    data = random.Random(size).randbytes(size)

    async def main() -> None:
        await objects.put("a/b", data)
        assert await objects.get("a/b") == data
        assert b"".join([piece async for piece in objects.stream("a/b", len(data))]) == data
        for start, end in ((0, size), (0, 1), (size - 1, size), (size // 3, size // 2 + 1)):
            assert await objects.get_range("a/b", start, end) == data[start:end]
        info = await objects.head("a/b")
        assert (info.path, info.size) == ("a/b", size)

    run(main())


def test_an_empty_object_is_an_object(objects: Objects) -> None:
    async def main() -> None:
        await objects.put("empty", b"")
        assert await objects.get("empty") == b""
        assert (await objects.head("empty")).size == 0
        assert [piece async for piece in objects.stream("empty", 0) if piece] == []

    run(main())


@pytest.mark.parametrize("size", [3, 9 << 20])
def test_a_file_is_put_as_its_content(objects: Objects, tmp_path: Path, size: int) -> None:
    upload = tmp_path / "upload"
    upload.write_bytes(random.Random(1).randbytes(size))

    async def main() -> None:
        await objects.put("uploads/one", upload)
        assert await objects.get("uploads/one") == upload.read_bytes()

    run(main())


def test_a_put_never_replaces_what_is_there(objects: Objects) -> None:
    async def main() -> None:
        await objects.put("once", b"first")
        with pytest.raises(Unavailable) as refused:
            await objects.put("once", b"second")
        assert refused.value.code == "object_exists"
        assert await objects.get("once") == b"first"

    run(main())


def test_of_many_puts_at_once_exactly_one_wins(objects: Objects) -> None:
    async def main() -> None:
        outcomes = await asyncio.gather(
            *(objects.put("race", b"%d" % number) for number in range(8)), return_exceptions=True
        )
        winners = [number for number, outcome in enumerate(outcomes) if outcome is None]
        assert len(winners) == 1
        assert await objects.get("race") == b"%d" % winners[0]

    run(main())


@pytest.mark.parametrize("ask", ["get", "get_range", "head", "copy", "stream"])
def test_an_object_that_is_not_there_is_not_found_by_its_name(objects: Objects, ask: str) -> None:
    async def main() -> None:
        with pytest.raises(NotFound, match="not/there") as refused:
            if ask == "get":
                await objects.get("not/there")
            elif ask == "get_range":
                await objects.get_range("not/there", 0, 1)
            elif ask == "head":
                await objects.head("not/there")
            elif ask == "copy":
                await objects.copy("not/there", "target")
            else:
                [piece async for piece in objects.stream("not/there", 10)]
        assert refused.value.code == "object_not_found"

    run(main())


def test_deleting_is_final_and_deleting_again_is_as_good(objects: Objects) -> None:
    async def main() -> None:
        await objects.put("gone/soon", b"x")
        await objects.delete("gone/soon")
        await objects.delete("gone/soon")
        with pytest.raises(NotFound):
            await objects.get("gone/soon")
        assert await paths(objects, "gone/") == set()
        await objects.put("gone/soon", b"again")
        assert await objects.get("gone/soon") == b"again"

    run(main())


def test_a_copy_lives_on_when_its_source_is_gone(objects: Objects) -> None:
    async def main() -> None:
        await objects.put("snapshots/source", b"content")
        await objects.copy("snapshots/source", "snapshots/copy")
        await objects.delete("snapshots/source")
        assert await objects.get("snapshots/copy") == b"content"

    run(main())


def test_listing_gives_exactly_what_lies_below_a_prefix_with_sizes_and_times(objects: Objects) -> None:
    async def main() -> None:
        assert await paths(objects, "segments/") == set()
        for number in range(30):
            await objects.put(f"segments/bucket=b{number % 3}/{number:02d}", b"x" * (number + 1))
        await objects.put("segments-not/other", b"x")
        await objects.put("manifests/0000/1", b"x")
        found = [entry async for entry in objects.list("segments/")]
        assert {entry.path: entry.size for entry in found} == {
            f"segments/bucket=b{number % 3}/{number:02d}": number + 1 for number in range(30)
        }
        assert all(entry.modified_ms > 1_700_000_000_000 for entry in found)
        assert len(await paths(objects, "")) == 32

    run(main())


def test_a_listing_longer_than_a_page_is_whole(objects: Objects) -> None:
    async def main() -> None:
        names = {f"many/{number:05d}" for number in range(1100)}
        for start in range(0, 1100, 50):
            await asyncio.gather(*(objects.put(f"many/{number:05d}", b"x") for number in range(start, start + 50)))
        assert await paths(objects, "many/") == names

    run(main())


@pytest.mark.parametrize("path", AWKWARD)
def test_awkward_names_come_back_as_they_were_given(objects: Objects, path: str) -> None:
    async def main() -> None:
        await objects.put(path, b"content")
        assert await objects.get(path) == b"content"
        assert (await objects.head(path)).path == path
        assert await paths(objects, "") == {path}
        await objects.delete(path)
        assert await paths(objects, "") == set()

    run(main())


# -- what is particular to each ----------------------------------------------------------------------------------


def test_a_folder_holds_plain_files_under_the_same_names(tmp_path: Path) -> None:
    objects = open_objects(ObjectStoreSettings("fs", tmp_path / "store", {}))
    for path in AWKWARD:
        run(objects.put(path, path.encode()))
        assert (tmp_path / "store" / path).read_bytes() == path.encode()


def test_s3_without_a_prefix_uses_the_whole_bucket(s3_server: S3Server) -> None:
    """The default of `cold.path`, for whom a bucket of its own is enough."""
    objects = open_objects(ObjectStoreSettings("s3", Path(), s3_server.options))
    name = f"whole-bucket-{s3_server.new_prefix()}/x"
    run(objects.put(name, b"content"))
    assert run(objects.get(name)) == b"content"
    run(objects.delete(name))


def test_s3_prefixes_do_not_see_each_other(s3_server: S3Server) -> None:
    first, second = (
        open_objects(ObjectStoreSettings("s3", Path(s3_server.new_prefix()), s3_server.options)) for _ in range(2)
    )
    run(first.put("same", b"first"))
    run(second.put("same", b"second"))
    assert run(first.get("same")) == b"first"
    assert run(paths(first, "")) == {"same"}


def test_a_store_that_cannot_be_reached_is_unavailable_with_a_reason() -> None:
    options = {"bucket": "b", "region": "r", "endpoint": "http://127.0.0.1:9", "access_key_id": "a"}
    objects = open_objects(ObjectStoreSettings("s3", Path("p"), {**options, "secret_access_key": "b"}))
    with pytest.raises(Unavailable) as refused:
        run(objects.get("x"))
    assert refused.value.code == "object_store_unavailable"
    assert refused.value.retry_after_seconds > 0
    assert refused.value.message.startswith("the object store failed: ")


@pytest.mark.parametrize(
    ("backend", "key"), [("s3", "cold.s3_bucket"), ("gcs", "cold.gcs_bucket"), ("azure", "cold.azure_container")]
)
def test_a_cloud_store_without_its_bucket_is_refused_by_the_setting_that_lacks(backend: str, key: str) -> None:
    with pytest.raises(ConfigurationError, match=key):
        open_objects(ObjectStoreSettings(backend, Path("prefix"), {}))
