"""Merging: one update stands for all, whatever order they came in and whatever else was among them."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping
from random import Random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pycrdt import Array, Doc, Map, Text, merge_updates

from millstream.protocol.lib0 import frame_update
from millstream.yjs import apply_updates, merging
from millstream.yjs.merging import merge
from millstream.yjs.pipe import LENGTH, pack_records, unpack_records


def edits(count: int, seed: int = 1, client_id: int | None = None) -> list[bytes]:
    """The updates of somebody who types, deletes, and fills a map."""
    random = Random(seed)
    doc = Doc({"text": Text(), "map": Map(), "list": Array()}, client_id=client_id)
    updates: list[bytes] = []
    subscription = doc.observe(lambda event: updates.append(event.update))
    text: Any = doc["text"]
    shared: Any = doc["map"]
    items: Any = doc["list"]
    while len(updates) < count:
        action = random.random()
        if action < 0.7:
            text.insert(random.randint(0, len(str(text))), random.choice("abc "))
        elif action < 0.85 and len(str(text)) > 1:
            del text[0:1]
        elif action < 0.95:
            shared[random.choice("xyz")] = random.randrange(100)
        else:
            items.append(random.randrange(100))
    doc.unobserve(subscription)
    return updates


def contents(*updates: bytes) -> tuple[str, object, object]:
    doc = Doc({"text": Text(), "map": Map(), "list": Array()})
    for update in updates:
        doc.apply_update(update)
    return str(doc["text"]), doc["map"].to_py(), doc["list"].to_py()


def framed(updates: list[bytes]) -> list[bytes]:
    return [frame_update(update) for update in updates]


def test_a_snapshot_stands_for_all_updates() -> None:
    updates = edits(500)
    merged = merge(b"", framed(updates))
    assert contents(merged.snapshot) == contents(*updates)
    assert merged.skipped == []
    assert len(merged.snapshot) < sum(map(len, updates))


def test_several_updates_in_one_message_count_each() -> None:
    updates = edits(50)
    merged = merge(b"", [b"".join(framed(updates[:30])), b"".join(framed(updates[30:]))])
    assert contents(merged.snapshot) == contents(*updates)


@given(st.integers(1, 60), st.integers(0, 60), st.integers(0, 2**32))
@settings(max_examples=30)
def test_merging_in_steps_is_merging_at_once(count: int, first: int, seed: int) -> None:
    updates = edits(count, seed, client_id=seed + 1)
    half = merge(b"", framed(updates[:first])).snapshot if first else b""
    assert contents(merge(half, framed(updates[first:])).snapshot) == contents(*updates)


@given(st.lists(st.integers(0, 39), unique=True, min_size=1), st.integers(0, 2**32))
@settings(max_examples=60)
def test_an_update_that_waits_for_another_is_in_the_snapshot(missing: list[int], seed: int) -> None:
    """Whoever still has what is missing may send it after the compaction: then all must be there."""
    updates = edits(40, seed, client_id=seed + 1)
    present = [update for number, update in enumerate(updates) if number not in missing]
    snapshot = merge(b"", framed(present)).snapshot
    again = merge(snapshot, []).snapshot  # and in the snapshot after that
    late = [updates[number] for number in missing]
    assert contents(merge_updates(again, *late)) == contents(*updates)
    assert contents(merge(again, framed(late)).snapshot) == contents(*updates)


def test_malformed_updates_are_told_by_place_and_left_out() -> None:
    updates = edits(20)
    messages = framed(updates)
    bad = [frame_update(b"\xff" * 20), b"\x7fnot framed", frame_update(updates[3][:-1])]
    mixed = [*messages[:5], bad[0], *messages[5:10], bad[1], *messages[10:], bad[2]]
    merged = merge(b"", mixed)
    places = [sum(map(len, mixed[: mixed.index(one)])) for one in bad]
    assert [place for place, _ in merged.skipped] == places
    assert all(reason for _, reason in merged.skipped)
    assert contents(merged.snapshot) == contents(*updates)


@pytest.mark.parametrize("count", [1, 5])
def test_updates_on_which_the_library_panics_are_left_out(count: int) -> None:
    updates = edits(30)
    panics = [panicking_update(updates, number) for number in range(count)]
    messages = framed(updates)
    for panic in panics:
        messages.insert(25, frame_update(panic))
    merged = merge(b"", messages)
    assert contents(merged.snapshot) == contents(*updates)
    assert len(merged.skipped) == count


def panicking_update(updates: list[bytes], number: int) -> bytes:
    """A damaged copy of an update that decodes, and cannot be integrated."""
    random = Random(number)
    while True:
        damaged = bytearray(random.choice(updates))
        damaged[random.randrange(len(damaged))] = random.randrange(256)
        doc: Doc = Doc()
        for update in updates[:25]:
            doc.apply_update(update)
        try:
            doc.apply_update(bytes(damaged))
        except ValueError:
            continue
        except BaseException:
            return bytes(damaged)


def test_a_snapshot_that_cannot_be_read_fails_rather_than_losing_what_it_stood_for() -> None:
    with pytest.raises(ValueError, match="snapshot"):
        merge(b"\xff\xff\xff", framed(edits(3)))


@given(st.lists(st.binary(max_size=100)))
def test_records_in_the_pipe_round_trip(records: list[bytes]) -> None:
    assert unpack_records(pack_records(records)) == records


def test_apply_updates_is_what_a_reader_does() -> None:
    updates = edits(10)
    doc = Doc({"text": Text(), "map": Map(), "list": Array()})
    assert apply_updates(doc, b"".join(framed(updates))) == 10
    assert (str(doc["text"]), doc["map"].to_py(), doc["list"].to_py()) == contents(*updates)


# -- updates that end the process that reads them ----------------------------------------------------------------


def varuint(number: int) -> bytes:
    return bytes([number]) if number < 128 else bytes([number & 127 | 128]) + varuint(number >> 7)


def values(client: int, *encoded: bytes) -> bytes:
    """A well-formed update that sets so many keys of the map `m`, to values that are encoded as lib0's `any`."""
    entries = [
        bytes([8 | 32, 1, 1]) + b"m" + b"\x08%03d%05d" % (client, number) + b"\1" + one
        for number, one in enumerate(encoded)
    ]
    return b"\1" + varuint(len(entries)) + varuint(client) + b"\0" + b"".join(entries) + b"\0"


def nested(depth: int, client: int = 77) -> bytes:
    """Arrays in arrays, so many deep."""
    return values(client, bytes([117, 1]) * depth + bytes([126]))


DEADLY = nested(200_000)


def merged_by_process(snapshot: bytes, messages: list[bytes], memory_bytes: int = 1 << 30) -> tuple[Any, bytes]:
    """What the merging process answers: its head, and the snapshot."""
    command = [sys.executable, "-m", "millstream.yjs.merging", str(memory_bytes)]
    records = pack_records([snapshot, *messages])
    answer = subprocess.run(command, input=records, stdout=subprocess.PIPE, check=True).stdout
    (length,) = LENGTH.unpack_from(answer)
    return json.loads(answer[LENGTH.size : LENGTH.size + length]), answer[LENGTH.size + length :]


def test_an_update_that_kills_its_reader_is_left_out_and_the_rest_is_merged() -> None:
    good = edits(40)
    messages = framed([*good[:10], DEADLY, *good[10:20], nested(3, client=78), DEADLY, *good[20:]])
    head, snapshot = merged_by_process(b"", messages)
    assert contents(snapshot) == contents(*good, nested(3, client=78))
    assert [place for place, _ in head["skipped"]] == [sum(map(len, messages[:number])) for number in (10, 22)]
    assert all("was ended by SIG" in reason for _, reason in head["skipped"])
    # The next time there is a snapshot before them.
    head, again = merged_by_process(snapshot, framed([DEADLY, nested(2, client=79)]))
    assert contents(again) == contents(*good, nested(3, client=78), nested(2, client=79))
    assert [place for place, _ in head["skipped"]] == [0]


def test_a_document_that_needs_more_memory_than_allowed_loses_no_update_over_it() -> None:
    """No update is left out that can be read by itself: it has done nothing wrong."""
    updates = framed([values(client, *[bytes([126])] * 10_000) for client in range(1, 21)])
    head, snapshot = merged_by_process(b"", updates[:1], 20 << 20)
    assert head["skipped"] == [] and snapshot
    head, snapshot = merged_by_process(b"", updates, 20 << 20)
    assert "no single update is the reason" in head["error"] and not snapshot


def test_deadly_updates_without_end_are_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(merging, "DEADLY_UPDATES_MAX", 3)

    def attempt(updates: list[merging.Update], left_out: Mapping[int, str]) -> merging.Built | merging.Died:
        at = next(number for number in range(len(updates)) if number not in left_out)
        return merging.Died(at, "was ended")

    with pytest.raises(ValueError, match="more than 3 updates"):
        merge(b"", framed(edits(10)), attempt)
    with pytest.raises(ValueError, match="the snapshot so far cannot be read"):
        merge(b"snapshot", framed(edits(10)), attempt)


@pytest.mark.parametrize("deadly", [0, 6, 9])
def test_a_process_that_dies_at_the_end_is_bisected_for_the_update_it_died_of(deadly: int) -> None:
    updates = edits(10)

    def attempt(some: list[merging.Update], left_out: Mapping[int, str]) -> merging.Built | merging.Died:
        if any(one.data == updates[deadly] for number, one in enumerate(some) if number not in left_out):
            return merging.Died(None, "was ended")
        return merging.build_in_process(some, left_out)

    places = [place for place, _ in merge(b"", framed(updates), attempt).skipped]
    assert places == [sum(len(one) for one in framed(updates[:deadly]))]
