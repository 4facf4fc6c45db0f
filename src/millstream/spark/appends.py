"""From rows to appends: rows by stream, each stream's in its order, cut into as few appends as they fit into.

A `Group` is the rows of one stream in one task. On a JSON stream many messages make one append; on any other stream a
message is an append.

Rows that have a message's `position` and `offset_start` are a copy, whose streams are to have the order of the
original. Within a task they are sorted by position. Between tasks the server keeps the order: each append has the
position of its last message as `Stream-Seq`, so that one that comes behind later messages is refused.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Final, NamedTuple

import msgspec
import pyarrow as arrow
import pyarrow.compute as compute
from pyspark.sql.types import LongType, StructType

from millstream.client import Appended, ClientError, Forbidden, NotFound, Producer, SequenceGap, Unauthorized
from millstream.protocol.content_types import is_json
from millstream.protocol.keys import StreamKey
from millstream.protocol.producers import INTEGER_MAX
from millstream.sizes import human_bytes
from millstream.spark.errors import SourceError
from millstream.spark.options import ARRIVAL, WriteOptions
from millstream.spark.rows_as_json import encoder_of
from millstream.spark.source_client import SourceClient

ROWS_AT_ONCE: Final = 4096
MESSAGES_PER_APPEND: Final = 100_000  # a server takes 131,072 by default

_PLACES: Final = ("position", "offset_start")
_DOCUMENT: Final = msgspec.json.Decoder(msgspec.Raw)


class Group(NamedTuple):
    """One stream's messages in the order they are to have."""

    key: StreamKey
    content_type: str
    messages: list[bytes]
    positions: Sequence[int] = ()
    """Of a copy: where the messages are in the log they come from, in ascending order."""


class Totals:
    """What the senders of a task have done together."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.messages = self.appends = self.repeated = 0

    def add(self, messages: int, *, is_repeat: bool) -> None:
        with self._lock:
            self.messages += messages
            self.appends += 1
            self.repeated += is_repeat


# -- rows to groups ----------------------------------------------------------------------------------------------


def groups_of(table: arrow.Table | None, schema: StructType, options: WriteOptions) -> Iterator[Group]:
    """A task's rows by stream, in a fixed order of streams."""
    if table is None or not table.num_rows:
        return
    keys = _keys(table, options)
    order = _order(keys, table, schema, options)
    encode = encoder_of(schema)
    names = keys.take(order)
    start = 0
    total = table.num_rows
    buckets, streams, types = (_Texts(names.column(name)) for name in ("bucket", "stream", "content_type"))
    positions = table.column("position").take(order).to_pylist() if is_copy(schema, options) else None
    for stop in [*_edges(names), total]:
        key = StreamKey(buckets.at(start), streams.at(start))
        messages: list[bytes] = []
        for at in range(start, stop, ROWS_AT_ONCE):
            messages += encode(table.take(order.slice(at, min(ROWS_AT_ONCE, stop - at))))
        group = Group(key, types.at(start), messages, positions[start:stop] if positions is not None else ())
        _check_positions(group)
        if is_json(group.content_type) and "payload" in table.column_names:
            _check_documents(group)
        yield group
        start = stop


def is_copy(schema: StructType, options: WriteOptions) -> bool:
    """Whether rows are messages of streams whose order is to be kept: no other order is asked for."""
    has_places = all(name in schema.fieldNames() and schema[name].dataType == LongType() for name in _PLACES)
    return has_places and "payload" in schema.fieldNames() and options.order_by in ((), ("position",), (ARRIVAL,))


def _check_positions(group: Group) -> None:
    for before, after in pairwise(group.positions):
        if before is None or after is None or before >= after:
            raise SourceError(
                f"the rows for stream {str(group.key)!r} are not in the order of their positions ({before}, {after}):"
                " the copy would have another order than the original",
                hint="leave out orderBy=arrival, and they are sorted; write with orderBy=none if order does not matter",
            )


def _check_documents(group: Group) -> None:
    """A row is one message. Since rows are sent side by side in an array, `1,2` would become two."""
    for message in group.messages:
        try:
            _DOCUMENT.decode(message)
        except (msgspec.DecodeError, RecursionError) as error:
            raise SourceError(
                f"a row for stream {str(group.key)!r} is not one JSON value ({error}): {message[:200]!r}",
                hint="filter such rows out, or write them to a stream of another type: the option 'contentType'",
            ) from None


class _Texts:
    """A text column, looked at in single places."""

    def __init__(self, column: arrow.ChunkedArray) -> None:
        self._column = column

    def at(self, row: int) -> str:
        return str(self._column[row].as_py())


def _keys(table: arrow.Table, options: WriteOptions) -> arrow.Table:
    """For each row the bucket and stream it goes to, and the type of a stream that has to be created for it."""
    columns = {}
    for name, given in (("bucket", options.bucket), ("stream", options.stream), ("content_type", None)):
        if name in table.column_names and (name != "content_type" or "payload" in table.column_names):
            column = table.column(name)
            if given is not None:
                column = compute.fill_null(column, given)
            elif name == "content_type":
                column = compute.fill_null(column, options.content_type)
            if column.null_count:
                raise SourceError(
                    f"the column {name!r} is null in some rows",
                    hint=f"fill it, or give the option {name!r} for such rows",
                )
            columns[name] = column
        else:
            columns[name] = arrow.repeat(given if name != "content_type" else options.content_type, table.num_rows)
    return arrow.table(columns)


def _order(keys: arrow.Table, table: arrow.Table, schema: StructType, options: WriteOptions) -> arrow.Array:
    """The rows' numbers by stream and, within it, by the columns that order it, or as they came in."""
    sorting = [("bucket", "ascending"), ("stream", "ascending")]
    columns = {"bucket": keys.column("bucket"), "stream": keys.column("stream")}
    order_columns = options.order_columns or (
        ("position",) if is_copy(schema, options) and not options.order_by else ()
    )
    for number, name in enumerate(order_columns):
        columns[f"order_{number}"] = table.column(name)
        sorting.append((f"order_{number}", "ascending"))
    if order_columns and "payload" in table.column_names:
        # Rows that the columns do not tell apart must come in one order all the same.
        columns["payload"] = table.column("payload")
        sorting.append(("payload", "ascending"))
    columns["row"] = arrow.array(range(table.num_rows), arrow.int64())
    sorting.append(("row", "ascending"))
    return compute.sort_indices(arrow.table(columns), sort_keys=sorting)


def _edges(names: arrow.Table) -> list[int]:
    """Where in sorted rows another stream begins."""
    differs = None
    for name in ("bucket", "stream"):
        column = names.column(name).combine_chunks()
        changed = compute.not_equal(column.slice(1), column.slice(0, len(column) - 1))
        differs = changed if differs is None else compute.or_(differs, changed)
    return [int(place) + 1 for place in compute.indices_nonzero(differs).to_pylist()]


# -- groups to appends -------------------------------------------------------------------------------------------


class Sender:
    """Sends groups, one append after another."""

    def __init__(self, client: SourceClient, options: WriteOptions, producer: str, epoch: int, totals: Totals) -> None:
        self._options = options
        self._producer = producer
        self._epoch = epoch
        self._totals = totals
        self._client = client

    def send(self, group: Group) -> None:
        appends = list(self._appends(group))
        has_order = bool(self._options.order_columns or group.positions) or self._options.keeps_arrival
        if len(appends) > 1 and not has_order and self._has_earlier_attempt(group, appends[0][0]):
            raise self._ambiguous(group, len(appends))
        done = 0
        for seq, (body, messages) in enumerate(appends):
            done += messages
            last_position = group.positions[done - 1] if group.positions else None
            appended = self._append(group, body, seq, last_position)
            self._totals.add(messages, is_repeat=appended.duplicate)

    def _appends(self, group: Group) -> Iterator[tuple[bytes, int]]:
        """Bodies, and how many messages each has; their edges depend on the messages and their order alone."""
        if not is_json(group.content_type):
            for message in group.messages:
                yield message, 1
            return
        gathered: list[bytes] = []
        size = 2
        for message in group.messages:
            is_full = size + len(message) + 1 > self._options.append_bytes_max or len(gathered) == MESSAGES_PER_APPEND
            if gathered and is_full:
                yield b"[%b]" % b",".join(gathered), len(gathered)
                gathered, size = [], 2
            gathered.append(message)
            size += len(message) + 1
        yield b"[%b]" % b",".join(gathered), len(gathered)

    def _append(self, group: Group, body: bytes, seq: int, last_position: int | None = None) -> Appended:
        producer = Producer(self._producer, self._epoch, seq)
        stream_seq = f"{last_position:020d}" if last_position is not None else None
        try:
            try:
                return self._client.append(group.key, group.content_type, body, producer, stream_seq)
            except NotFound:
                if not self._options.creates_streams:
                    raise
            # A stream below /v1/stream/ brings its bucket along; a mistyped one must not come into being.
            self._client.check_bucket(group.key.bucket)
            self._client.create(group.key, group.content_type)
            return self._client.append(group.key, group.content_type, body, producer, stream_seq)
        except ClientError as error:
            raise self._refused(group, error) from None

    def _has_earlier_attempt(self, group: Group, body: bytes) -> bool:
        """Whether another attempt has begun to write this group, asked with an append that is never accepted."""
        try:
            self._client.append(group.key, group.content_type, body, Producer(self._producer, self._epoch, INTEGER_MAX))
        except SequenceGap as gap:
            return gap.expected > 0
        except ClientError:
            pass  # no such stream, no such epoch, or something the append itself will be told
        return False

    def _ambiguous(self, group: Group, appends: int) -> SourceError:
        size = sum(len(message) for message in group.messages)
        return SourceError(
            f"stream {str(group.key)!r} gets {len(group.messages):,} messages ({human_bytes(size)}) from one partition."
            f" They take {appends:,} appends, and an earlier attempt has written some of them: which, cannot be told"
            " without an order of the rows",
            hint="give the option orderBy=<columns that order a stream's rows>; or orderBy=arrival, if every attempt"
            " gets the rows in the same order; or make micro-batches smaller, so that a stream's rows fit one append",
        )

    def _refused(self, group: Group, error: ClientError) -> SourceError:
        """What the server said, in terms of what was to be written."""
        what = f"stream {str(group.key)!r} takes no messages of this write"
        hints = {
            "producer_fenced": (
                f"{what}: {error.message}",
                "a later micro-batch, or a higher txnVersion, was written under the same sink; if the checkpoint was"
                " deleted, give the query another txnAppId",
            ),
            "content_type_mismatch": (
                f"{what}: {error.message}",
                f"it was written as {group.content_type!r}: set the option 'contentType' to the stream's own type",
            ),
            "stream_not_found": (f"{what}: it does not exist", "create it, or set the option createStreams=true"),
            "sequence_conflict": (
                f"{what}: it has later messages of the same copy already, which another partition wrote",
                "let one partition have all rows of a stream: repartition('stream'), or partitionBy=stream where they"
                " are read; or write with orderBy=none, if order does not matter",
            ),
            "stream_closed": (f"{what}: it is closed", "leave its rows out, or write to another stream"),
            "bucket_not_found": (f"{what}: bucket {group.key.bucket!r} does not exist", "create it first"),
            "payload_too_large": (
                f"{what}: {error.message}",
                "set the option maxAppendBytes below the server's http.body_bytes_max",
            ),
        }
        message, hint = hints.get(error.code, (f"{what}: {error.status} {error.code} {error.message}", error.hint))
        if isinstance(error, Unauthorized | Forbidden):
            hint = "give the option 'token' one that may write to this bucket"
        return SourceError(message, hint=hint)
