"""The options of `format("millstream")`: parsed once, on the driver, with errors that name option, value and remedy.

Spark hands over options with lower-case names and text values, and mixes in some of its own (`path`,
`checkpointLocation`), which are left alone. Any other option that is not known is refused: a limit that is misspelled
would not be noticed otherwise.
"""

from __future__ import annotations

import difflib
import json
import re
import ssl
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Final, NamedTuple, TypeVar
from urllib.parse import urlsplit

from millstream.protocol.content_types import JSON
from millstream.spark.errors import SourceError
from millstream.tiers.objects import ObjectStoreSettings

T = TypeVar("T")

_NAMES: Final = (
    "url",
    "token",
    "cacert",
    "bucket",
    "stream",
    "prefix",
    "cold",
    "cold.endpoint",
    "cold.region",
    "cold.accessKeyId",
    "cold.secretAccessKey",
    "cold.sessionToken",
    "cold.serviceAccount",
    "cold.accountName",
    "cold.accountKey",
    "columns",
    "mode",
    "columnNameOfCorruptRecord",
    "startingOffsets",
    "endingOffsets",
    "startingTimestamp",
    "endingTimestamp",
    "maxBytesPerTrigger",
    "maxRecordsPerTrigger",
    "maxPartitionBytes",
    "minPartitions",
    "partitionBy",
    "failOnDataLoss",
    "pushFilters",
    "serverTimeout",
    "contentType",
    "orderBy",
    "txnAppId",
    "txnVersion",
    "txnLedger",
    "txnResume",
    "maxAppendBytes",
    "createStreams",
)
_SPELLINGS: Final = {name.lower(): name for name in _NAMES}
_SPARK_OPTIONS: Final = ("path", "checkpointlocation", "queryname", "outputmode", "mergeschema")

# Options of Kafka's and Delta's connectors, and what does the same here.
_OPTIONS_OF_OTHER_SOURCES: Final = {
    "kafka.bootstrap.servers": "name the server with 'url'",
    "subscribe": "name what to read with 'bucket', and 'stream' or 'prefix'",
    "subscribepattern": "name what to read with 'bucket' and 'prefix'",
    "assign": "name what to read with 'bucket', and 'stream' or 'prefix'",
    "topic": "name where to write with 'bucket' and 'stream', or columns of these names",
    "maxoffsetspertrigger": "limit a micro-batch with 'maxRecordsPerTrigger' or 'maxBytesPerTrigger'",
    "minoffsetspertrigger": "give the query a trigger with an interval",
    "maxfilespertrigger": "limit a micro-batch with 'maxBytesPerTrigger'",
    "startingoffsetsbytimestamp": "give 'startingTimestamp', or a time as 'startingOffsets'",
    "endingoffsetsbytimestamp": "give 'endingTimestamp', or a time as 'endingOffsets'",
    "startingversion": "give a position as 'startingOffsets'",
    "endingversion": "give a position as 'endingOffsets'",
}
# No time in milliseconds that anybody means lies before 1973; one in seconds does.
_MILLISECONDS_MIN: Final = 100_000_000_000
_MILLISECONDS_MAX: Final = 253_402_300_799_999

_SIZE: Final = re.compile(r"([0-9]+)\s*(b|k|kb|kib|m|mb|mib|g|gb|gib)?", re.IGNORECASE)
_UNITS: Final = {"": 1, "b": 1, "k": 1 << 10, "m": 1 << 20, "g": 1 << 30}
_SECONDS: Final = re.compile(r"([0-9]+(?:\.[0-9]+)?)\s*(ms|s|m)?", re.IGNORECASE)
_INTEGER_MAX: Final = 2**53 - 1

MODES: Final = ("PERMISSIVE", "DROPMALFORMED", "FAILFAST")
ARRIVAL: Final = "arrival"
UNORDERED: Final = "none"
BY_STREAM: Final = "stream"
BY_POSITION: Final = "position"


class Bound(NamedTuple):
    """Where a read starts or ends: `earliest`, `latest`, a position per shard, or a time in milliseconds."""

    kind: str
    positions: dict[int, int]
    at_ms: int


EARLIEST: Final = Bound("earliest", {}, 0)
LATEST: Final = Bound("latest", {}, 0)


@dataclass(frozen=True)
class Connection:
    """How to reach the server."""

    url: str
    token: str | None
    timeout_seconds: float
    # A PEM file with the authority to trust, on the driver and on every executor; None for the system's.
    cacert: str | None = None

    def trust(self) -> ssl.SSLContext | None:
        return ssl.create_default_context(cafile=self.cacert) if self.cacert is not None else None


@dataclass(frozen=True)
class ColdRoot:
    """Where the object store is, as far as the options say: the rest the server says."""

    root: ObjectStoreSettings | None
    credentials: dict[str, str]


@dataclass(frozen=True)
class ReadOptions:
    connection: Connection
    cold: ColdRoot
    bucket: str
    stream: str | None
    prefix: str
    columns: tuple[str, ...]
    mode: str
    corrupt_column: str
    starting: Bound | None
    ending: Bound | None
    bytes_per_trigger: int | None
    records_per_trigger: int | None
    partition_bytes: int
    partitions_min: int
    partition_by: str
    fail_on_data_loss: bool
    push_filters: bool


@dataclass(frozen=True)
class WriteOptions:
    connection: Connection
    bucket: str | None
    stream: str | None
    content_type: str
    order_by: tuple[str, ...]
    transaction_app_id: str | None
    transaction_version: int | None
    has_ledger: bool
    """Whether the server notes a version that was written, so that it is not written again in other partitions."""
    may_resume: bool
    """Whether a version that another attempt has begun has the same rows in the same partitions now."""
    append_bytes_max: int
    creates_streams: bool

    @property
    def keeps_arrival(self) -> bool:
        """Whether the rows are said to arrive in the same order in every attempt."""
        return self.order_by == (ARRIVAL,)

    @property
    def is_unordered(self) -> bool:
        """Whether the order of a stream's rows is said not to matter."""
        return self.order_by == (UNORDERED,)

    @property
    def order_columns(self) -> tuple[str, ...]:
        return () if self.keeps_arrival or self.is_unordered else self.order_by


class _OptionReader:
    """The options as they were given, and the ways to read one."""

    def __init__(self, options: Mapping[str, str]) -> None:
        self._options = {name.lower(): value for name, value in options.items()}
        if "provider" in self._options or not self._options:
            raise SourceError(
                "CREATE TABLE … USING millstream does not work: Spark does not keep the options of such a table",
                hint="use CREATE TEMPORARY VIEW … USING millstream OPTIONS (url '…', bucket '…')",
            )
        for name in self._options:
            if name in _OPTIONS_OF_OTHER_SOURCES:
                raise SourceError(f"there is no option {name!r}", hint=_OPTIONS_OF_OTHER_SOURCES[name])
            if name not in _SPELLINGS and name not in _SPARK_OPTIONS:
                close = difflib.get_close_matches(name, _SPELLINGS, n=1, cutoff=0.7)
                hint = f"did you mean {_SPELLINGS[close[0]]!r}?" if close else f"there are {', '.join(_NAMES)}"
                raise SourceError(f"there is no option {name!r}", hint=hint)

    def text(self, name: str) -> str | None:
        value = self._options.get(name.lower())
        return value if value else None

    def required(self, name: str, remedy: str) -> str:
        value = self.text(name)
        if value is None:
            raise SourceError(f"the option {name!r} is missing", hint=remedy)
        return value

    def parsed(self, name: str, parse: Callable[[str], T], expects: str) -> T | None:
        value = self.text(name)
        if value is None:
            return None
        try:
            return parse(value.strip())
        except (ValueError, KeyError, OverflowError):
            raise SourceError(f"the option {name!r} is {value!r}", hint=f"it takes {expects}") from None

    def flag(self, name: str, default: bool) -> bool:
        found = self.parsed(name, lambda value: {"true": True, "false": False}[value.lower()], "true or false")
        return default if found is None else found

    def names(self, name: str) -> tuple[str, ...]:
        return tuple(part.strip() for part in (self.text(name) or "").split(",") if part.strip())


def read_options(options: Mapping[str, str]) -> ReadOptions:
    given = _OptionReader(options)
    stream, prefix = given.text("stream"), given.text("prefix")
    if stream is not None and prefix is not None:
        raise SourceError(
            f"the options 'stream' ({stream!r}) and 'prefix' ({prefix!r}) exclude each other", hint="give one of them"
        )
    starting = _bound(given, "startingOffsets", "startingTimestamp")
    ending = _bound(given, "endingOffsets", "endingTimestamp")
    _check_bounds(starting, ending)
    mode = given.parsed("mode", lambda value: {name: name for name in MODES}[value.upper()], " or ".join(MODES))
    return ReadOptions(
        connection=_connection(given),
        cold=_cold(given),
        bucket=given.required("bucket", "name the bucket to read: .option('bucket', 'my-bucket')"),
        stream=stream,
        prefix=prefix or "",
        columns=given.names("columns"),
        mode=mode or MODES[0],
        corrupt_column=given.text("columnNameOfCorruptRecord") or "_corrupt_record",
        starting=starting,
        ending=ending,
        bytes_per_trigger=given.parsed("maxBytesPerTrigger", _positive_size, "a size such as 64m, more than nothing"),
        records_per_trigger=given.parsed("maxRecordsPerTrigger", _positive_integer, "a whole number, 1 or more"),
        partition_bytes=given.parsed("maxPartitionBytes", _positive_size, "a size such as 128m, more than nothing")
        or 64 << 20,
        partitions_min=given.parsed("minPartitions", _positive_integer, "a whole number, 1 or more") or 1,
        partition_by=given.parsed(
            "partitionBy",
            lambda value: {"stream": BY_STREAM, "position": BY_POSITION}[value.lower()],
            "stream or position",
        )
        or BY_STREAM,
        fail_on_data_loss=given.flag("failOnDataLoss", True),
        push_filters=given.flag("pushFilters", False),
    )


def write_options(options: Mapping[str, str], *, is_streaming: bool = False) -> WriteOptions:
    given = _OptionReader(options)
    version = given.parsed("txnVersion", _integer, "a whole number from 0 to 2^53-1")
    app = given.text("txnAppId")
    if version is not None and is_streaming:
        raise SourceError(
            f"the option 'txnVersion' ({version}) is for batch writes; a streaming query counts its micro-batches",
            hint="leave it out",
        )
    if app is not None and version is None and not is_streaming:
        raise SourceError(
            f"the option 'txnAppId' ({app!r}) says who writes, and 'txnVersion' is missing: all writes would be one",
            hint="give both, with a higher txnVersion for each write, or neither",
        )
    if version is not None and app is None:
        raise SourceError(
            f"the option 'txnVersion' ({version}) counts the writes of an application, and 'txnAppId' is missing",
            hint="give both, or neither",
        )
    return WriteOptions(
        connection=_connection(given),
        bucket=given.text("bucket"),
        stream=given.text("stream"),
        content_type=given.text("contentType") or JSON,
        order_by=given.names("orderBy"),
        transaction_app_id=app,
        transaction_version=version,
        has_ledger=given.flag("txnLedger", True),
        may_resume=given.flag("txnResume", False),
        append_bytes_max=given.parsed("maxAppendBytes", _positive_size, "a size such as 4m, more than nothing")
        or 4 << 20,
        creates_streams=given.flag("createStreams", True),
    )


def _connection(given: _OptionReader) -> Connection:
    url = given.required("url", "say where the server is: .option('url', 'http://127.0.0.1:4437')").rstrip("/")
    for one in url.split(","):
        parts = urlsplit(one.strip())
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise SourceError(f"the option 'url' is {url!r}", hint="write it as http://127.0.0.1:4437")
    timeout = given.parsed("serverTimeout", _seconds, "a duration such as 60s")
    cacert = given.text("cacert")
    if cacert is not None and not Path(cacert).is_file():
        raise SourceError(f"the option 'cacert' is {cacert!r}, and there is no such file", hint="name a PEM file")
    return Connection(url, given.text("token"), 60.0 if timeout is None else timeout, cacert)


def _cold(given: _OptionReader) -> ColdRoot:
    names = {
        "cold.endpoint": "endpoint",
        "cold.region": "region",
        "cold.accessKeyId": "access_key_id",
        "cold.secretAccessKey": "secret_access_key",
        "cold.sessionToken": "session_token",
        "cold.serviceAccount": "service_account",
        "cold.accountName": "account_name",
        "cold.accountKey": "account_key",
    }
    credentials = {ours: value for name, ours in names.items() if (value := given.text(name)) is not None}
    root = given.parsed("cold", _root, "a folder, s3://bucket/prefix, gs://bucket/prefix or az://container/prefix")
    return ColdRoot(root, credentials)


def _root(value: str) -> ObjectStoreSettings:
    scheme, separator, rest = value.partition("://")
    if not separator or scheme == "file":
        return ObjectStoreSettings("fs", Path(rest if separator else value).absolute(), {})
    backend, container = {
        "s3": ("s3", "bucket"),
        "s3a": ("s3", "bucket"),
        "gs": ("gcs", "bucket"),
        "az": ("azure", "container"),
        "abfs": ("azure", "container"),
    }[scheme]
    name, _, prefix = rest.partition("/")
    if not name:
        raise ValueError
    return ObjectStoreSettings(backend, Path(prefix), {container: name})


def _bound(given: _OptionReader, offsets: str, timestamp: str) -> Bound | None:
    expects = 'earliest, latest, a position such as 1042 or {"0": 1042}, or a time such as 2026-01-31T12:00:00Z'
    bound = given.parsed(offsets, parse_bound, expects)
    at_ms = given.parsed(timestamp, _integer, "milliseconds since 1970")
    if at_ms is None:
        return bound
    if bound is not None:
        raise SourceError(f"the options {offsets!r} and {timestamp!r} exclude each other", hint="give one of them")
    if at_ms > _MILLISECONDS_MAX:
        raise SourceError(
            f"the option {timestamp!r} is {at_ms}, which in milliseconds is beyond the year 9999",
            hint=f"it takes milliseconds: {at_ms // 1000} if these are microseconds",
        )
    if 0 < at_ms < _MILLISECONDS_MIN:
        raise SourceError(
            f"the option {timestamp!r} is {at_ms}, which in milliseconds is in {1970 + at_ms // 31_556_952_000}",
            hint=f"it takes milliseconds: {at_ms}000 if these are seconds",
        )
    return Bound("time", {}, at_ms)


def _check_bounds(starting: Bound | None, ending: Bound | None) -> None:
    """A read whose end lies before its start would be empty without a word."""
    if starting is None or ending is None or starting.kind != ending.kind:
        return
    for shard in starting.positions.keys() & ending.positions.keys():
        first, last = starting.positions[shard], ending.positions[shard]
        if first > last:
            raise SourceError(f"the read starts at position {first} and ends before {last}", hint="swap them")
    if starting.at_ms > ending.at_ms:
        raise SourceError(
            f"the read starts at {starting.at_ms} and ends before {ending.at_ms} (milliseconds since 1970)",
            hint="swap them",
        )


def check_batch_bounds(options: ReadOptions) -> None:
    """A batch read from the end on, or up to the beginning, would be empty without a word."""
    if options.starting == LATEST:
        raise SourceError(
            "the option 'startingOffsets' is 'latest': a batch read from there on has no rows",
            hint="leave it out to read from the beginning, or use spark.readStream",
        )
    if options.ending == EARLIEST:
        raise SourceError(
            "the option 'endingOffsets' is 'earliest': a batch read up to there has no rows", hint="leave it out"
        )


def check_streaming_bounds(options: ReadOptions) -> None:
    if options.ending is not None:
        raise SourceError(
            "the options 'endingOffsets' and 'endingTimestamp' are for batch reads; a streaming query does not end",
            hint="leave them out; trigger(availableNow=True) reads what there is and stops",
        )


def parse_bound(value: str) -> Bound:
    if value.lower() in ("earliest", "latest"):
        return EARLIEST if value.lower() == "earliest" else LATEST
    if value.isascii() and value.isdigit():
        return Bound("positions", {0: _integer(value)}, 0)
    if value.startswith("{"):
        positions = {int(shard): position for shard, position in json.loads(value).items()}
        if not positions or not all(type(one) is int and 0 <= one <= _INTEGER_MAX for one in positions.values()):
            raise ValueError
        return Bound("positions", positions, 0)
    moment = datetime.fromisoformat(value)
    if moment.tzinfo is None:
        moment = moment.replace(tzinfo=UTC)
    return Bound("time", {}, int(moment.timestamp() * 1000))


def _integer(value: str) -> int:
    if not value.isascii() or not value.isdigit() or int(value) > _INTEGER_MAX:
        raise ValueError
    return int(value)


def _positive_integer(value: str) -> int:
    number = _integer(value)
    if number == 0:
        raise ValueError
    return number


def _positive_size(value: str) -> int:
    match = _SIZE.fullmatch(value)
    if match is None or int(match[1]) == 0:
        raise ValueError
    return int(match[1]) * _UNITS[(match[2] or "")[:1].lower()]


def _seconds(value: str) -> float:
    match = _SECONDS.fullmatch(value)
    if match is None:
        raise ValueError
    return float(match[1]) * {"": 1.0, "s": 1.0, "ms": 0.001, "m": 60.0}[(match[2] or "").lower()]
