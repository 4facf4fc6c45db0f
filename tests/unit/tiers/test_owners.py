"""Owner objects: the codec, and what can be told of a damaged one."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from millstream.errors import Corrupt
from millstream.tiers.objects import ObjectStoreSettings, open_objects
from millstream.tiers.owners import Owner, decode_owner, encode_owner, owner_path, presumed_owner
from millstream.units import Milliseconds
from support.fake_time import FakeClock, run

NUMBERS = st.integers(0, 2**62)
OWNERS = st.builds(Owner, st.text(), NUMBERS, NUMBERS, st.text(), st.text(), NUMBERS)


@given(OWNERS)
def test_any_owner_survives_the_round_trip(owner: Owner) -> None:
    assert decode_owner(encode_owner(owner), "p") == owner


@given(OWNERS, st.data())
def test_an_owner_that_is_cut_off_is_refused_by_its_name(owner: Owner, data: st.DataObject) -> None:
    encoded = encode_owner(owner)
    with pytest.raises(Corrupt, match="the-path"):
        decode_owner(encoded[: data.draw(st.integers(0, len(encoded) - 1))], "the-path")


@given(OWNERS, st.data())
def test_an_owner_with_a_bit_flipped_is_refused_or_says_the_same(owner: Owner, data: st.DataObject) -> None:
    """JSON has spellings that mean the same, and names of fields that nobody asks for."""
    damaged = bytearray(encode_owner(owner))
    damaged[data.draw(st.integers(0, len(damaged) - 1))] ^= 1 << data.draw(st.integers(0, 7))
    try:
        assert decode_owner(bytes(damaged), "the-path") == owner
    except Corrupt as error:
        assert "the-path" in error.message


@given(st.binary())
def test_whatever_else_is_there_is_refused(data: bytes) -> None:
    with pytest.raises(Corrupt):
        decode_owner(data, "p")


@pytest.mark.parametrize("readable", [[], [3], [3, 4]])
def test_of_a_damaged_owner_the_epoch_is_known_and_the_store_from_those_before_it(
    tmp_path: Path, readable: list[int]
) -> None:
    async def main() -> None:
        objects = open_objects(ObjectStoreSettings("fs", tmp_path, {}))
        for epoch in readable:
            owner = Owner("store", epoch, 0, f"claim {epoch}", "somebody", Milliseconds(1))
            await objects.put(owner_path(0, epoch), encode_owner(owner))
        await objects.put(owner_path(0, 5), b"damaged")
        found = await presumed_owner(objects, 0)
        assert found is not None
        assert (found.epoch, found.since, found.claim) == (5, 6, "")
        assert found.store == ("store" if readable else "")
        assert await presumed_owner(objects, 1) is None

    run(main(), FakeClock())
