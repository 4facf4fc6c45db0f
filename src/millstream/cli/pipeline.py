"""`millstream pipeline …`: jobs on Spark that maintain the stored data or process it in bulk."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from millstream.cli.options import print_json, print_table
from millstream.cli.parser import Parser
from millstream.cli.progress import Progress
from millstream.cli.remote import add_connection, server_address
from millstream.cli.spark_jobs import plain_errors, quiet_start, tasks_shown
from millstream.errors import ConfigurationError, NotFound, Unavailable
from millstream.sizes import human_bytes

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from millstream.spark.options import ColdRoot, Connection
    from millstream.spark.source_client import SourceClient


class Job(NamedTuple):
    name: str
    summary: str
    add_arguments: Callable[[argparse.ArgumentParser], None]
    run: Callable[[argparse.Namespace], int]


def add_parser(commands: Any) -> None:
    parser: Parser = commands.add_parser(
        "pipeline",
        help="run a job on Spark: compact, export, materialize, audit, import, usage",
        description="Jobs on Spark. Each may be run again at any time, and while the server takes writes.",
    )
    actions = parser.add_actions("job", "JOB")
    for job in JOBS:
        one = actions.add_parser(job.name, help=job.summary, description=job.summary)
        _add_common(one)
        job.add_arguments(one)
        one.set_defaults(run=partial(_run, job))


def _run(job: Job, options: argparse.Namespace) -> int:
    options.spark_log = []
    with plain_errors(options.spark_log):
        return job.run(options)


def _add_common(parser: argparse.ArgumentParser) -> None:
    add_connection(parser, seconds=60.0)
    parser.add_argument(
        "--cold",
        metavar="ROOT",
        help="the object store, if it is not where the server says: a folder, s3://…, gs://…, az://…",
    )
    parser.add_argument("--master", default="local[*]", help="where Spark runs (default local[*])")
    parser.add_argument(
        "--conf", metavar="NAME=VALUE", action="append", default=[], help="a setting for Spark; repeatable"
    )


def _connection(options: argparse.Namespace, buckets: Sequence[str] = ()) -> tuple[Connection, ColdRoot]:
    """The connection to the server. If it is unreachable or lacks a bucket, fail before Spark starts."""
    from millstream.spark.errors import SourceError
    from millstream.spark.options import read_options
    from millstream.spark.source_client import SourceClient

    read = read_options({**_source_options(options), "bucket": "-"})
    client = SourceClient(read.connection)
    try:
        client.check_reachable()
    except SourceError as error:
        raise Unavailable(error.message, hint="check --url, and that the server runs") from None
    else:
        for bucket in buckets:
            _check_bucket(client, bucket, read.connection.url)
    finally:
        client.close()
    return read.connection, read.cold


def _check_bucket(client: SourceClient, bucket: str, url: str) -> None:
    from millstream.spark.errors import SourceError

    try:
        client.check_bucket(bucket)
    except SourceError as error:
        if error.code != "bucket_not_found":
            raise
        raise NotFound(
            f"{url} has no bucket {bucket!r}", code=error.code, hint="`millstream buckets ls` lists those there are"
        ) from None


def _source_options(options: argparse.Namespace) -> dict[str, str]:
    """The server and the object store, as options of the data source."""
    address = server_address(options)
    given = {
        "url": address.url,
        "token": address.token,
        "cacert": address.cacert,
        "cold": options.cold,
        "serverTimeout": f"{options.timeout:.0f}s",
    }
    return {name: value for name, value in given.items() if value}


def _session(options: argparse.Namespace) -> SparkSession:
    from millstream.spark.session import spark_session

    conf: dict[str, object] = {}
    for setting in options.conf:
        name, separator, value = setting.partition("=")
        if not separator:
            raise ConfigurationError(f"--conf {setting!r} has no value", hint="write --conf name=value")
        conf[name.strip()] = value.strip()
    with quiet_start() as log:
        if log is not None:
            options.spark_log.append(log)
        return spark_session(f"millstream {options.job}", options.master, **conf)


class _Bar:
    """A progress bar whose total becomes known when the job reports it."""

    def __init__(self, label: str) -> None:
        self._label = label
        self._bar: Progress | None = None
        self._total = 0
        self._done = 0

    def __call__(self, done: int, total: int) -> None:
        if self._bar is None or total != self._total:
            self.close()
            self._bar, self._total, self._done = Progress(self._label, total).__enter__(), total, 0
        self._bar.advance(done - self._done)
        self._done = done

    def close(self) -> None:
        if self._bar is not None:
            self._bar.__exit__(None, None, None)


def duration_argument(value: str) -> float:
    from millstream.config import DURATION

    try:
        return float(DURATION.parse(value))
    except ValueError:
        raise argparse.ArgumentTypeError(f"{value!r} is not {DURATION.expects}") from None


def size_argument(value: str) -> int:
    from millstream.config import SOME_SIZE

    try:
        return int(SOME_SIZE.parse(value))
    except ValueError:
        raise argparse.ArgumentTypeError(f"{value!r} is not {SOME_SIZE.expects}") from None


# -- compact ---------------------------------------------------------------------------------------------------------


def _add_compact(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--bucket", action="append", default=[], help="only this bucket; repeatable (default all)")
    parser.add_argument(
        "--target-bytes",
        type=size_argument,
        default=128 << 20,
        help="payload of a new segment; a task takes about four times that in memory (default 128MiB)",
    )
    parser.add_argument(
        "--segments-min", type=int, default=2, help="small segments of a bucket and day that are worth merging"
    )
    parser.add_argument(
        "--dead-share", type=float, default=0.3, help="a segment of which this much is dead is written anew"
    )


def _compact(options: argparse.Namespace) -> int:
    from millstream.pipeline.compact import CompactOptions, compact

    connection, cold = _connection(options, options.bucket)
    bar = _Bar("compacting")
    try:
        summary = compact(
            _session(options),
            CompactOptions(
                connection, cold, tuple(options.bucket), options.target_bytes, options.segments_min, options.dead_share
            ),
            bar,
        )
    finally:
        bar.close()
    if options.json:
        print_json(summary._asdict())
    elif not summary.groups:
        print("nothing to compact")
    else:
        rate = human_bytes(int(summary.payload_bytes / max(summary.seconds, 0.001)))
        headings = ("segments before", "after", "messages", "payload", "dead, left out", "seconds", "per second")
        row = (
            summary.segments_before,
            summary.segments_after,
            summary.messages,
            human_bytes(summary.payload_bytes),
            human_bytes(summary.dead_bytes),
            f"{summary.seconds:.1f}",
            rate,
        )
        print_table(headings, [row])
    if summary.refused:
        print(f"{summary.refused} groups were changed meanwhile and left for the next run", file=sys.stderr)
    return 0


# -- audit -----------------------------------------------------------------------------------------------------------


def _add_audit(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--report", metavar="FILE", type=Path, help="write a report with charts, as HTML")
    parser.add_argument(
        "--orphan-age",
        type=duration_argument,
        default=3600.0,
        help="how old an object must be to count as left behind (default 1h)",
    )


def _audit(options: argparse.Namespace) -> int:
    from millstream.pipeline.audit import AuditOptions, audit
    from millstream.pipeline.audit_report import positions, render

    connection, cold = _connection(options)
    spark = _session(options)
    with tasks_shown(spark, "checking"):
        report = audit(spark, AuditOptions(connection, cold, options.orphan_age))
    if options.report is not None:
        options.report.write_text(render(report, connection.url), encoding="utf-8")
    if options.json:
        described = report._asdict() | {"problems": [problem._asdict() for problem in report.problems]}
        described.pop("figures")
        print_json(described)
    else:
        for problem in report.problems:
            print(f"{problem.where}: {problem.what}", file=sys.stderr)
        print(
            f"checked {report.segments:,} segments with {report.messages:,} messages"
            f" ({human_bytes(report.payload_bytes)}) of {report.streams:,} streams, {positions(report)},"
            f" in {report.seconds:.1f} s: {len(report.problems)} problems"
        )
    return 1 if report.problems else 0


# -- usage -----------------------------------------------------------------------------------------------------------


def _add_usage(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--bucket", action="append", default=[], help="only this bucket; repeatable (default all)")
    parser.add_argument("--chart", metavar="FILE", type=Path, help="write table and charts, as HTML")


def _usage(options: argparse.Namespace) -> int:
    from millstream.pipeline.usage import UsageOptions, render, usage

    connection, cold = _connection(options, options.bucket)
    spark = _session(options)
    with tasks_shown(spark, "counting"):
        rows = usage(spark, UsageOptions(connection, cold, tuple(options.bucket)))
    if options.chart is not None:
        options.chart.write_text(render(rows), encoding="utf-8")
    if options.json:
        print_json([row._asdict() for row in rows])
    else:
        headings = ("bucket", "day", "streams", "messages", "payload", "stored")
        lines = [(*row[:4], human_bytes(row.payload_bytes), human_bytes(row.stored_bytes)) for row in rows]
        print_table(headings, lines)
    return 0


# -- export ----------------------------------------------------------------------------------------------------------


def _add_export(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("bucket", help="the bucket to export")
    parser.add_argument("output", help="where the tables are: a folder, s3://…, gs://…, az://…")
    parser.add_argument("--format", choices=("parquet", "delta"), default="parquet", help="(default parquet)")
    parser.add_argument("--prefix", default="", help="only streams whose names start so")
    parser.add_argument("--raw-only", action="store_true", help="no typed table of the JSON messages")


def _export(options: argparse.Namespace) -> int:
    from millstream.pipeline.export import ExportOptions, export, output_settings

    connection, _ = _connection(options, [options.bucket])
    given = ExportOptions(
        connection,
        _source_options(options),
        options.bucket,
        output_settings(options.output),
        options.format,
        options.prefix,
        not options.raw_only,
    )
    spark = _session(options)
    with tasks_shown(spark, "exporting"):
        summary = export(spark, given)
    if options.json:
        print_json(summary._asdict())
    elif not summary.messages:
        print(f"nothing new: the tables have bucket {options.bucket} up to position {summary.last_position:,}")
    else:
        headings = ("batch", "positions", "messages", "typed rows", "files", "new columns", "seconds")
        positions = f"{summary.first_position}–{summary.last_position}"
        columns = ", ".join(summary.new_columns) or "–"
        row = (summary.batch, positions, summary.messages, summary.typed_rows, summary.files, columns)
        print_table(headings, [(*row, f"{summary.seconds:.1f}")])
    return 0


# -- materialize -----------------------------------------------------------------------------------------------------


def _add_materialize(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("bucket", help="the bucket whose streams are folded")
    parser.add_argument(
        "--fold", required=True, help="merge-patch, last-by-key, yjs, or a function of your own as module:function"
    )
    parser.add_argument("--key", help="for last-by-key: the field that is the key")
    parser.add_argument("--prefix", default="", help="only streams whose names start so")
    parser.add_argument("--content-type", help="of the snapshots, if not what the fold says")
    parser.add_argument(
        "--messages-min", type=int, default=1, help="leave streams alone that have fewer new messages (default 1)"
    )
    parser.add_argument("--dry-run", action="store_true", help="fold everything and publish nothing")


def _materialize(options: argparse.Namespace) -> int:
    from millstream.pipeline.materialize import MaterializeOptions, materialize

    connection, _ = _connection(options, [options.bucket])
    given = MaterializeOptions(
        connection,
        _source_options(options),
        options.bucket,
        options.fold,
        options.prefix,
        options.key,
        options.content_type,
        options.messages_min,
        is_dry_run=options.dry_run,
    )
    spark = _session(options)
    with tasks_shown(spark, "folding"):
        summary = materialize(spark, given)
    if options.json:
        failures = [failure._asdict() for failure in summary.failures]
        print_json(summary._asdict() | {"failures": failures, "dry_run": options.dry_run})
        return 1 if summary.failed else 0
    for failure in summary.failures:
        print(f"stream {failure.stream!r} was left as it is: {failure.reason}", file=sys.stderr)
    if summary.failed:
        print(f"{summary.failed:,} streams cannot be folded; the others were", file=sys.stderr)
    if options.dry_run:
        print(f"{summary.published:,} snapshots would be published ({human_bytes(summary.snapshot_bytes)})")
    elif not summary.published:
        print("nothing new to fold")
    else:
        headings = ("snapshots", "overtaken", "messages", "read", "snapshot bytes", "seconds")
        row = (summary.published, summary.overtaken, summary.messages, human_bytes(summary.read_bytes))
        print_table(headings, [(*row, human_bytes(summary.snapshot_bytes), f"{summary.seconds:.1f}")])
    return 1 if summary.failed else 0


# -- import ----------------------------------------------------------------------------------------------------------


def _add_import(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("bucket", help="the bucket to import into; it must exist")
    parser.add_argument(
        "source", nargs="+", metavar="FILE", help="files or folders, or the URL of a server and paths of streams there"
    )
    parser.add_argument("--name", required=True, help="what is imported under one name is imported once")
    parser.add_argument("--format", choices=("parquet", "json"), help="of files (default: by their names)")
    parser.add_argument("--stream", help="the stream for all rows, if they do not say")
    parser.add_argument("--stream-column", help="the column that names the stream (default stream)")
    parser.add_argument("--order-by", help="columns that give a stream's rows their order (default: as they come)")
    parser.add_argument("--content-type", help="of new streams (default application/json)")
    parser.add_argument("--from-token", help="the token for the server that is read")


def _import(options: argparse.Namespace) -> int:
    from millstream.pipeline.bulk_import import ImportOptions, import_files, import_server

    connection, _ = _connection(options, [options.bucket])
    given = ImportOptions(connection, _source_options(options), options.bucket, options.name, options.content_type)
    bar = _Bar("importing")
    try:
        if options.source[0].startswith(("http://", "https://")):
            origin, streams = _origin(options)
            summary = import_server(_session(options), given, origin, streams, bar)
        else:
            files = [Path(one) for one in options.source]
            kind = options.format or ("json" if files[0].suffix in (".json", ".jsonl", ".ndjson") else "parquet")
            summary = import_files(
                _session(options), given, files, kind, options.stream, options.stream_column, options.order_by, bar
            )
    finally:
        bar.close()
    if options.json:
        print_json(summary._asdict())
    else:
        row = (summary.parts, summary.messages, summary.repeated, f"{summary.seconds:.1f}")
        print_table(("files or streams", "messages", "appends that were there", "seconds"), [row])
    return 0


def _origin(options: argparse.Namespace) -> tuple[Connection, list[tuple[str, str]]]:
    """The other server, and the new name of each of its streams. Importing a millstream bucket imports all its
    streams."""
    from millstream.client import Client
    from millstream.spark.options import Connection

    url, paths = options.source[0].rstrip("/"), options.source[1:]
    origin = Connection(url, options.from_token, 60.0, server_address(options).cacert)
    if not paths:
        raise ConfigurationError(
            "the other server's streams are not named", hint="name paths of streams, or bucket/ for a whole bucket"
        )
    streams: list[tuple[str, str]] = []
    with Client(url, token=options.from_token, ssl_context=origin.trust()) as client:
        for path in paths:
            if path.endswith("/"):
                bucket = path.rstrip("/")
                streams += [(f"{bucket}/{entry.name}", entry.name) for entry in client.bucket(bucket).list()]
            else:
                streams.append((path, path.partition("/")[2] or path))
    return origin, streams


JOBS = (
    Job("compact", "merge small segments into large ones, and leave out what is dead", _add_compact, _compact),
    Job("export", "write what is new in a bucket into tables, as Parquet or Delta", _add_export, _export),
    Job("materialize", "fold streams into their current state, published as snapshots", _add_materialize, _materialize),
    Job("audit", "prove that the cold tier is whole and the server agrees; exit code 1 if not", _add_audit, _audit),
    Job("import", "load files, or streams of another server, exactly once", _add_import, _import),
    Job("usage", "add up streams, messages and bytes by bucket and day", _add_usage, _usage),
)
