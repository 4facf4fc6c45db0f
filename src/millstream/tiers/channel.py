"""What a process and one that it started say to each other: messages of several parts over a socket.

A message is the number of its parts (4 bytes, little-endian), the length of each (8 bytes), and the parts. A part may
be given as very many pieces, which are not joined first. Sending and receiving let go of the interpreter.
"""

from __future__ import annotations

import socket
import struct
from collections.abc import Sequence
from typing import Final

from millstream.slices import batched

PIECES_AT_ONCE: Final = 1024  # what the kernel takes in one call
PARTS_MAX: Final = 64

Piece = bytes | bytearray | memoryview
Part = Piece | Sequence[Piece]


class ChannelClosed(Exception):
    """The other side has gone."""


class Channel:
    def __init__(self, connection: socket.socket) -> None:
        self._socket = connection

    def send(self, *parts: Part) -> None:
        assert len(parts) <= PARTS_MAX
        pieces = [[part] if isinstance(part, Piece) else part for part in parts]
        lengths = [sum(map(len, some)) for some in pieces]
        try:
            self._socket.sendall(struct.pack(f"<I{len(parts)}Q", len(parts), *lengths))
            for some in pieces:
                for few in batched(some, PIECES_AT_ONCE):
                    self._send_pieces(few)
        except OSError as error:
            raise ChannelClosed(str(error)) from None

    def _send_pieces(self, pieces: Sequence[Piece]) -> None:
        sent = self._socket.sendmsg(pieces)
        for piece in pieces:
            if sent < len(piece):
                self._socket.sendall(memoryview(piece)[sent:])
            sent = max(sent - len(piece), 0)

    def receive(self) -> list[memoryview]:
        (count,) = struct.unpack("<I", self._receive(4))
        if count > PARTS_MAX:
            raise ChannelClosed("what came is not a message")
        return [self._receive(length) for length in struct.unpack(f"<{count}Q", self._receive(8 * count))]

    def _receive(self, length: int) -> memoryview:
        view = rest = memoryview(bytearray(length))
        try:
            while rest:
                received = self._socket.recv_into(rest)
                if not received:
                    raise ChannelClosed("the connection has ended")
                rest = rest[received:]
        except OSError as error:
            raise ChannelClosed(str(error)) from None
        return view

    def close(self) -> None:
        self._socket.close()
