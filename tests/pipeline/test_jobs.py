"""usage, audit, export, materialize and import on a real server and real Spark: right, repeatable, clear when not."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import deltalake
import httpx
import pyarrow as arrow
import pyarrow.dataset as dataset
import pyarrow.parquet as parquet
import pytest
from pycrdt import Doc, Text

from millstream.errors import Conflict, InvalidRequest
from millstream.pipeline import audit_report
from millstream.pipeline import export as export_module
from millstream.pipeline.audit import AuditOptions, audit
from millstream.pipeline.bulk_import import ImportOptions, import_files, import_server
from millstream.pipeline.compact import CompactOptions, compact
from millstream.pipeline.export import ExportOptions, entry_path, export
from millstream.pipeline.materialize import MaterializeOptions, materialize
from millstream.pipeline.usage import UsageOptions, render, usage
from millstream.protocol.lib0 import frame_update
from millstream.tiers.objects import ObjectStoreSettings
from support.cold import names, token
from support.pipeline import NO_COLD, Scene, fill

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

BYTES = {"content-type": "application/octet-stream"}


# -- usage and audit -------------------------------------------------------------------------------------------------


def test_usage_counts_what_is_alive_and_audit_finds_nothing_wrong_until_there_is(
    spark: SparkSession, scene: Scene, tmp_path: Path
) -> None:
    fill(scene, "counted", flushes=2)
    scene.create("/counted/trimmed")
    scene.append("/counted/trimmed", {"a": 1}, {"a": 2}, {"a": 3})
    scene.create("/counted/gone")
    scene.append("/counted/gone", {"never": "counted"})
    scene.flushed()
    assert scene.client.put(f"/counted/trimmed/snapshot/{token(8)}", content=b"{}").status_code == 204
    assert scene.client.delete("/counted/gone").status_code == 204
    scene.flushed()
    [row] = usage(spark, UsageOptions(scene.connection, NO_COLD))
    items = [item for item in scene.feed("counted") if item["event"] == "message"]
    expected = sum(int(item["next_offset"][17:]) - int(item["offset"][17:]) for item in items)
    assert (row.bucket, row.streams, row.messages, row.payload_bytes) == ("counted", 5, len(items), expected)
    page = render([row])
    assert page.startswith("<!doctype html>") and "<svg" in page and "counted" in page and "<script" not in page

    options = AuditOptions(scene.connection, NO_COLD, orphan_seconds=0.0)
    report = audit(spark, options)
    assert report.problems == [] and report.streams == 5 and report.segments == len(names(scene.store, "segments"))
    compact(spark, CompactOptions(scene.connection, NO_COLD))
    report = audit(spark, options)
    assert report.problems == [], "compaction leaves nothing behind that an audit would find"
    assert "everything is as it should be" in audit_report.render(report, scene.connection.url)

    # Now break it: a page, an orphan, a missing object.
    [segment] = [path for path in names(scene.store, "segments") if "compacted" in path]
    file = scene.store.folder / segment
    whole = file.read_bytes()
    file.write_bytes(whole[:60] + bytes([whole[60] ^ 1]) + whole[61:])
    (scene.store.folder / "segments/bucket=counted/stray.parquet").write_bytes(b"stray")
    snapshot = next(iter(names(scene.store, "snapshots")))
    (scene.store.folder / snapshot).unlink()
    broken = audit(spark, options)
    found = {(problem.kind, problem.where) for problem in broken.problems}
    assert ("segment", segment) in found
    assert ("object", "segments/bucket=counted/stray.parquet") in found
    assert ("object", snapshot) in found
    assert "problems" in audit_report.render(broken, scene.connection.url)
    # A segment that is gone takes its offsets with it.
    file.unlink()
    lost = audit(spark, options)
    assert {problem.where for problem in lost.problems if problem.kind == "stream"} >= {"counted/s0", "counted/s1"}


# -- export ----------------------------------------------------------------------------------------------------------


def rows_of(folder: Path, table: str) -> list[dict[str, Any]]:
    found = dataset.dataset(folder / table, partitioning="hive", format="parquet", schema=None)
    return sorted(found.to_table().to_pylist(), key=lambda row: row["position"])


@pytest.mark.parametrize("kind", ["parquet", "delta"])
def test_export_adds_what_is_new_once_and_new_fields_become_columns(
    spark: SparkSession, scene: Scene, tmp_path: Path, kind: str
) -> None:
    paths = fill(scene, "exported", flushes=2, streams=2)
    folder = tmp_path / "tables"
    options = ExportOptions(
        scene.connection, scene.source, "exported", ObjectStoreSettings("fs", folder, {}), format=kind
    )
    first = export(spark, options)
    assert first.messages == 12 and first.typed_rows == 10
    assert first.new_columns == ["n", "pad", "stream"]
    files = sorted(path.relative_to(folder) for path in folder.rglob("*.parquet"))
    again = export(spark, options)
    assert again.messages == 0 and sorted(path.relative_to(folder) for path in folder.rglob("*.parquet")) == files

    # New messages, hot and cold: another field, a value of another type, something nested, no object at all.
    scene.append(paths[0], {"n": 90, "score": 1.5, "deep": {"a": [1]}}, {"n": "ninety"}, 17)
    second = export(spark, options)
    assert second.messages == 3 and second.new_columns == ["deep", "score"]
    raw = [item for item in scene.feed("exported") if item["event"] == "message"]
    if kind == "delta":
        tables = {name: deltalake.DeltaTable(folder / name) for name in ("raw", "typed")}
        stored = {
            name: sorted(table.to_pyarrow_table().to_pylist(), key=lambda row: row["position"])
            for name, table in tables.items()
        }
        assert tables["raw"].transaction_version("millstream-export-exported") == 2
    else:
        stored = {name: rows_of(folder, name) for name in ("raw", "typed")}
    assert [row["position"] for row in stored["raw"]] == [item["position"] for item in raw]
    assert [row["stream"] for row in stored["raw"]] == [item["stream"] for item in raw]
    assert {row["bucket"] for row in stored["raw"]} == {"exported"}
    *_, ninety, wrong, seventeen = stored["typed"]
    if kind == "delta":
        assert (ninety["n"], ninety["score"], json.loads(ninety["deep"])) == (90, 1.5, {"a": [1]})
        assert stored["typed"][0]["score"] is None and stored["typed"][0]["stream_"] == 0
    assert ninety["_corrupt_record"] is None and ninety["n"] == 90
    assert wrong["n"] is None and json.loads(wrong["_corrupt_record"]) == {"n": "ninety"}
    assert seventeen["_corrupt_record"] == "17"


def entries_before(folder: Path, bucket: str) -> Any:
    """What a rival saw that began before the first batch was there."""

    async def none(objects: object, bucket: str) -> list[object]:
        return []

    assert (folder / entry_path(bucket, 1)).exists()
    return none


def test_an_export_that_died_leaves_nothing_that_counts_and_a_rival_loses(
    spark: SparkSession, scene: Scene, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fill(scene, "retried", flushes=1, streams=2)
    folder = tmp_path / "tables"
    output = ObjectStoreSettings("fs", folder, {})
    options = ExportOptions(scene.connection, scene.source, "retried", output)
    export(spark, options)
    assert len(rows_of(folder, "raw")) == 6
    # As if a run had died before its entry was written: files aside, which nobody sees and nobody needs.
    stray = folder / "_staging/raw/bucket=retried/date=2020-01-01/00000009-dead.parquet"
    stray.parent.mkdir(parents=True)
    stray.write_bytes(b"half a file")
    os.utime(stray, (0, 0))
    # As if the one before had died after its entry: its files are still aside.
    for file in [*folder.glob("raw/**/*.parquet"), *folder.glob("typed/**/*.parquet")]:
        aside = folder / "_staging" / file.relative_to(folder)
        aside.parent.mkdir(parents=True, exist_ok=True)
        file.rename(aside)
    assert export(spark, options).messages == 0
    assert not stray.exists() and len(rows_of(folder, "raw")) == 6
    # Two at a time: the entry of a batch can be made only once.
    scene.append("/retried/s0", {"n": 1})
    monkeypatch.setattr(export_module, "_entries", entries_before(folder, "retried"))
    with pytest.raises(Conflict, match="another export"):
        export(spark, options)
    monkeypatch.undo()
    assert export(spark, options).messages == 1 and len(rows_of(folder, "raw")) == 7
    with pytest.raises(Conflict, match="prefix"):
        export(spark, ExportOptions(scene.connection, scene.source, "retried", output, prefix="s0"))


# -- materialize -----------------------------------------------------------------------------------------------------


def bootstrap(client: httpx.Client, path: str) -> tuple[str, bytes]:
    answer = client.get(f"{path}/snapshot", follow_redirects=True)
    assert answer.status_code == 200, answer.text
    return answer.headers["stream-snapshot-offset"], answer.content


def test_materialize_publishes_folded_state_and_goes_on_from_it(spark: SparkSession, scene: Scene) -> None:
    scene.bucket("folded")
    for number in range(20):
        scene.create(f"/folded/m{number:02d}")
        scene.append(f"/folded/m{number:02d}", {"name": "a", "tags": {"x": 1, "y": 2}}, {"tags": {"x": None}})
    scene.flushed()
    scene.append("/folded/m00", {"n": number})  # still hot
    options = MaterializeOptions(scene.connection, scene.source, "folded", "merge-patch")
    summary = materialize(spark, options)
    assert (summary.published, summary.overtaken, summary.messages) == (20, 0, 41)
    assert json.loads(bootstrap(scene.client, "/folded/m01")[1]) == {"name": "a", "tags": {"y": 2}}
    offset, state = bootstrap(scene.client, "/folded/m00")
    assert json.loads(state) == {"name": "a", "tags": {"y": 2}, "n": 19}
    assert offset == scene.client.head("/folded/m00").headers["stream-next-offset"]
    assert scene.client.get("/folded/m00", params={"offset": "-1"}).status_code == 410
    assert materialize(spark, options).published == 0, "nothing is new"
    scene.append("/folded/m01", {"name": "b"})
    assert materialize(spark, options).published == 1
    assert json.loads(bootstrap(scene.client, "/folded/m01")[1]) == {"name": "b", "tags": {"y": 2}}


def test_materialize_folds_by_key_yjs_documents_and_by_a_function_of_the_user(
    spark: SparkSession, scene: Scene
) -> None:
    scene.bucket("folds")
    scene.create("/folds/keyed")
    scene.append("/folds/keyed", {"id": "a", "v": 1}, {"id": "b", "v": 2}, {"id": "a", "v": 3}, {"id": "b", "v": None})
    scene.create("/folds/doc", "application/octet-stream")
    doc: Any = Doc({"text": Text()})
    for word in ("Hello", ", ", "world"):
        before = doc.get_state()
        doc["text"] += word
        update = doc.get_update(before)
        assert len(update) < 128
        body = bytes([len(update)]) + update
        answer = scene.client.post("/folds/doc", headers={"content-type": "application/octet-stream"}, content=body)
        assert answer.status_code == 204
    fold = {"connection": scene.connection, "source_options": scene.source, "bucket": "folds"}
    assert materialize(spark, MaterializeOptions(**fold, fold="last-by-key", key="id", prefix="keyed")).published == 1
    assert json.loads(bootstrap(scene.client, "/folds/keyed")[1]) == {"a": {"id": "a", "v": 3}}
    assert materialize(spark, MaterializeOptions(**fold, fold="yjs", prefix="doc")).published == 1
    copy: Any = Doc({"text": Text()})
    copy.apply_update(bootstrap(scene.client, "/folds/doc")[1])
    assert str(copy["text"]) == "Hello, world"
    with pytest.raises(InvalidRequest, match="there is no fold"):
        materialize(spark, MaterializeOptions(**fold, fold="sum"))
    with pytest.raises(InvalidRequest, match="needs to know the key"):
        materialize(spark, MaterializeOptions(**fold, fold="last-by-key"))
    scene.create("/folds/own")
    scene.append("/folds/own", "short", "the longest of all", "longer")
    own = MaterializeOptions(**fold, fold="support.pipeline:longest", prefix="own")
    assert materialize(spark, own).published == 1
    assert bootstrap(scene.client, "/folds/own")[1] == b'"the longest of all"'


def test_materialize_publishes_snapshots_of_yjs_documents_below_any_path(spark: SparkSession, scene: Scene) -> None:
    scene.bucket("notes")
    paths = [f"/v1/yjs/notes/docs/{name}" for name in ("plan", "team/a plan", "team/deeply/below")]
    for path in paths:
        assert scene.client.put(path).status_code == 201
        doc: Any = Doc({"text": Text()})
        doc["text"] += f"written at {path}"
        answer = scene.client.post(path, content=frame_update(doc.get_update()), headers=BYTES)
        assert answer.status_code == 204, answer.text
        answer = scene.client.post(f"{path}?awareness=default", content=frame_update(b"\x01\x02"), headers=BYTES)
        assert answer.status_code == 204, answer.text
    scene.flushed()
    options = MaterializeOptions(scene.connection, scene.source, "notes", "yjs")
    assert materialize(spark, options).published == len(paths)
    for path in paths:
        answer = scene.client.get(path, params={"offset": "snapshot"}, follow_redirects=True)
        assert answer.url.params["offset"].endswith("_snapshot")
        copy: Any = Doc({"text": Text()})
        copy.apply_update(answer.content)
        assert str(copy["text"]) == f"written at {path}"
    assert materialize(spark, options).published == 0, "nothing is new"


# -- import ----------------------------------------------------------------------------------------------------------


def test_import_of_files_is_exactly_once_and_keeps_their_order(
    spark: SparkSession, scene: Scene, tmp_path: Path
) -> None:
    scene.bucket("loaded")
    lines = [{"stream": f"j{number % 3}", "n": number} for number in range(300)]
    folder = tmp_path / "lines"
    folder.mkdir()
    for part in range(3):
        text = "\n".join(json.dumps(line) for line in lines[part * 100 : part * 100 + 100])
        (folder / f"part-{part}.jsonl").write_text(text)
    seen: list[tuple[int, int]] = []
    options = ImportOptions(scene.connection, scene.source, "loaded", "lines")
    summary = import_files(spark, options, [folder], "json", progress=lambda done, total: seen.append((done, total)))
    assert (summary.parts, summary.messages) == (3, 300) and seen == [(1, 3), (2, 3), (3, 3)]
    expected = {number: [line["n"] for line in lines if line["stream"] == f"j{number}"] for number in range(3)}

    def found() -> dict[int, list[int]]:
        return {number: [row["n"] for row in json.loads(scene.read(f"/loaded/j{number}"))] for number in range(3)}

    assert found() == expected
    import_files(spark, options, [folder], "json")
    assert found() == expected, "the same import again adds nothing"

    table = arrow.table({"name": ["p1", "p1", "p2"], "payload": [b'{"a":1}', b'{"a":2}', b'"x"']})
    parquet.write_table(table, tmp_path / "rows.parquet")
    import_files(
        spark, ImportOptions(scene.connection, scene.source, "loaded", "rows"), [tmp_path / "rows.parquet"], "parquet",
        stream_column="name",
    )  # fmt: skip
    assert json.loads(scene.read("/loaded/p1")) == [{"a": 1}, {"a": 2}]


def test_import_from_another_server_copies_streams_once_with_type_and_closure(
    spark: SparkSession, scene: Scene
) -> None:
    paths = fill(scene, "origin", flushes=2)
    assert scene.client.post(paths[0], headers={"stream-closed": "true"}).status_code == 204
    large = b"0123456789" * 250_000
    scene.client.put("/origin/large", headers={"content-type": "application/octet-stream"})
    for at in range(0, len(large), 700_000):
        scene.client.post(
            "/origin/large", headers={"content-type": "application/octet-stream"}, content=large[at : at + 700_000]
        )
    scene.bucket("copied")
    streams = [(f"origin/{name}", name) for name in ("s0", "s1", "s2", "s3", "large")]
    options = ImportOptions(scene.connection, scene.source, "copied", "copy")
    first = import_server(spark, options, scene.connection, streams)
    assert first.parts == 5 and first.repeated == 0
    for _, name in streams:
        assert scene.read(f"/copied/{name}") == scene.read(f"/origin/{name}")
        copy, origin = scene.client.head(f"/copied/{name}"), scene.client.head(f"/origin/{name}")
        assert copy.headers["content-type"] == origin.headers["content-type"]
        assert copy.headers.get("stream-closed") == origin.headers.get("stream-closed")
    again = import_server(spark, options, scene.connection, streams)
    assert again.messages == 0 and again.repeated > 0
    assert scene.read("/copied/large") == large


# -- manners ---------------------------------------------------------------------------------------------------------


def command(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "millstream.cli.main", "pipeline", *arguments],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


def test_unknown_bucket_is_refused_before_spark_starts(scene: Scene) -> None:
    for job in (["usage", "--bucket", "nowhere"], ["export", "nowhere", "out"], ["compact", "--bucket", "nowhere"]):
        begun = time.monotonic()
        outcome = command(*job, "--url", scene.connection.url)
        assert outcome.returncode != 0
        assert "has no bucket 'nowhere'" in outcome.stderr and "buckets ls" in outcome.stderr
        assert time.monotonic() - begun < 8, "Spark alone takes longer to start on a busy machine"
        assert "java" not in outcome.stderr.lower()


def test_job_says_nothing_but_its_result(scene: Scene, tmp_path: Path) -> None:
    fill(scene, "runs", flushes=1)
    outcome = command("usage", "--url", scene.connection.url, "--master", "local[1]")
    assert outcome.returncode == 0, outcome.stderr
    assert "runs" in outcome.stdout
    assert outcome.stderr == ""
    outcome = command("import", "runs", str(tmp_path / "no.json"), "--name", "x", "--url", scene.connection.url)
    assert outcome.returncode != 0 and "there is no file" in outcome.stderr and "Traceback" not in outcome.stderr
    (tmp_path / "bad.parquet").write_bytes(b"not parquet")
    outcome = command("import", "runs", str(tmp_path / "bad.parquet"), "--name", "x", "--url", scene.connection.url)
    assert outcome.returncode != 0 and "Traceback" not in outcome.stderr and "\tat " not in outcome.stderr
    assert len(outcome.stderr.splitlines()) <= 3 and "Spark's log is in" in outcome.stderr
