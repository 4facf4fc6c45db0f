"""Messages between a process and one that it started: whole, in order, whatever their pieces; and never half of one."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from millstream.tiers.channel import PIECES_AT_ONCE, Channel, ChannelClosed


@pytest.fixture
def ends() -> Iterator[tuple[Channel, Channel]]:
    one, other = socket.socketpair()
    with one, other:
        for end in (one, other):
            end.settimeout(20)
        yield Channel(one), Channel(other)


def transfer(ends: tuple[Channel, Channel], *parts: bytes | list[bytes]) -> list[bytes]:
    sending = threading.Thread(target=ends[0].send, args=parts)
    sending.start()
    received = ends[1].receive()
    sending.join()
    return [bytes(part) for part in received]


@given(st.lists(st.binary(max_size=40) | st.lists(st.binary(max_size=9), max_size=20), max_size=8))
def test_parts_arrive_as_they_were_sent(parts: list[bytes | list[bytes]]) -> None:
    one, other = socket.socketpair()
    with one, other:
        joined = [part if isinstance(part, bytes) else b"".join(part) for part in parts]
        assert transfer((Channel(one), Channel(other)), *parts) == joined


def test_more_pieces_and_bytes_than_the_kernel_takes_at_once_arrive_whole(ends: tuple[Channel, Channel]) -> None:
    many = [b"%d" % number * 3 for number in range(3 * PIECES_AT_ONCE)]
    large = [bytes([number]) * (1 << 20) for number in range(5)]
    assert transfer(ends, b"word", many, large) == [b"word", b"".join(many), b"".join(large)]


def test_the_end_of_the_other_side_is_told_to_both_who_send_and_who_receive(ends: tuple[Channel, Channel]) -> None:
    ends[0].close()
    with pytest.raises(ChannelClosed):
        ends[1].receive()
    with pytest.raises(ChannelClosed):
        ends[1].send(b"x" * (1 << 20))


@pytest.mark.parametrize("count", range(1, 20))
def test_a_message_that_is_cut_off_is_none(count: int) -> None:
    one, other = socket.socketpair()
    with other:
        whole = b"\2\0\0\0" + (3).to_bytes(8, "little") + (1).to_bytes(8, "little") + b"abcd"
        one.sendall(whole[:count])
        one.close()
        with pytest.raises(ChannelClosed):
            Channel(other).receive()


def test_what_is_no_message_is_refused_before_room_is_made_for_it() -> None:
    one, other = socket.socketpair()
    with one, other:
        one.sendall(b"\xff" * 64)
        with pytest.raises(ChannelClosed, match="not a message"):
            Channel(other).receive()
