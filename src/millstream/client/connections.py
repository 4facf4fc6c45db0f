"""Blocking connections: a small pool of sockets per server, shared by the threads of a process.

Owns sockets, TLS and timeouts. `http1` formats and parses messages, and the conversation decides whether a failed
request is repeated.
"""

from __future__ import annotations

import contextlib
import select
import socket
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, Final

from millstream.client.errors import BadAnswer, ConnectionFailed
from millstream.client.http1 import AnswerParser, encode_head
from millstream.client.messages import Origin, Request, Response

if TYPE_CHECKING:
    import ssl

IDLE_CONNECTIONS_MAX: Final = 32
ANSWER_BYTES_MAX: Final = 1 << 30
RECEIVE_BYTES: Final = 256 << 10
JOINED_BODY_BYTES_MAX: Final = 64 << 10


class Connection:
    """One socket and the answer that is being read from it."""

    def __init__(self, origin: Origin, timeout: float, tls: ssl.SSLContext | None) -> None:
        self.origin = origin
        self.is_used = False
        self._parser = AnswerParser("GET")
        try:
            self._socket = _connected(origin, timeout, tls)
        except OSError as error:
            raise ConnectionFailed(
                f"cannot connect to {origin}: {reason_of(error)}",
                was_sent=False,
                timed_out=isinstance(error, TimeoutError),
                hint=remedy_of(error),
            ) from None

    def request(self, request: Request, timeout: float, on_sent: Callable[[], None] | None = None) -> AnswerParser:
        """Send a request and wait until its answer has begun; `on_sent` is called between the two."""
        parser = self._parser = AnswerParser(request.method)
        head = encode_head(self.origin, request)
        self._socket.settimeout(timeout)
        try:
            if len(request.body) <= JOINED_BODY_BYTES_MAX:
                self._socket.sendall(head + request.body)
            else:
                self._socket.sendall(head)
                self._socket.sendall(request.body)
        except TimeoutError:
            raise self._failure(f"{self.origin} took nothing for {timeout:g} s", timed_out=True) from None
        except OSError:
            pass  # the server may have refused the body before reading all of it; its answer says so
        if on_sent is not None:
            on_sent()
        while not parser.status:
            self._receive()
        self.is_used = True
        return parser

    def receive(self) -> bytes:
        """The next part of the body; empty at its end."""
        parser = self._parser
        while True:
            data = parser.take()
            if data or parser.is_complete:
                return data
            self._receive()

    def response(self) -> Response:
        """The whole body of an answer that has begun."""
        body = Body(ANSWER_BYTES_MAX)
        while not body.take(self._parser):
            self._receive()
        return Response(self._parser.status, self._parser.headers, body.joined())

    def _receive(self) -> None:
        try:
            data = self._socket.recv(RECEIVE_BYTES)
        except TimeoutError:
            raise self._failure(
                f"{self.origin} said nothing for {self._socket.gettimeout():g} s", timed_out=True
            ) from None
        except OSError as error:
            raise self._failure(f"the connection to {self.origin} broke: {reason_of(error)}") from None
        if data:
            self._parser.feed(data)
            return
        self._parser.end()
        if not self._parser.is_complete:
            raise self._failure(f"{self.origin} ended the connection before its answer")

    def _failure(self, message: str, *, timed_out: bool = False) -> ConnectionFailed:
        was_reused = self.is_used and not self._parser.status
        return ConnectionFailed(message, was_sent=True, was_reused=was_reused, timed_out=timed_out)

    @property
    def can_reuse(self) -> bool:
        return self._parser.is_complete and self._parser.can_reuse

    def is_stale(self) -> bool:
        """Whether the server has closed an idle connection, or has sent something unasked."""
        return is_readable(self._socket.fileno())

    def interrupt(self) -> None:
        """Wake a thread that is reading from this connection; it sees the end of the connection."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        self._socket.close()


class Pool:
    """Idle connections, shared by threads. A connection has one user at a time."""

    def __init__(self, timeout: float, live_timeout: float, tls: ssl.SSLContext | None) -> None:
        self._timeout = timeout
        self._live_timeout = live_timeout
        self._tls = tls
        self._idle: list[Connection] = []
        self._lock = threading.Lock()
        self._is_closed = False

    def exchange(
        self, origin: Origin, request: Request, *, is_live: bool = False, on_sent: Callable[[], None] | None = None
    ) -> Response:
        connection, parser = self.open(origin, request, is_live=is_live, on_sent=on_sent)
        try:
            response = (
                Response(parser.status, parser.headers, parser.take()) if parser.is_complete else connection.response()
            )
        except BaseException:
            connection.close()
            raise
        self.release(connection)
        return response

    def open(
        self,
        origin: Origin,
        request: Request,
        *,
        is_live: bool,
        on_sent: Callable[[], None] | None = None,
        on_connected: Callable[[Connection], None] | None = None,
    ) -> tuple[Connection, AnswerParser]:
        """A connection on which the answer to this request has begun; `release` returns it to the pool. `on_connected`
        is called with it before anything is sent, so that another thread can interrupt the wait."""
        connection = self._take(origin)
        try:
            if on_connected is not None:
                on_connected(connection)
            timeout = self._live_timeout if is_live else self._timeout
            return connection, connection.request(request, timeout, on_sent)
        except BaseException:
            connection.close()
            raise

    def _take(self, origin: Origin) -> Connection:
        while True:
            with self._lock:
                if self._is_closed:
                    raise ConnectionFailed("the client is closed", was_sent=False)
                found = next((one for one in reversed(self._idle) if one.origin == origin), None)
                if found is not None:
                    self._idle.remove(found)
            if found is None:
                return Connection(origin, self._timeout, self._context() if origin.scheme == "https" else None)
            if not found.is_stale():
                return found
            found.close()

    def _context(self) -> ssl.SSLContext:
        if self._tls is None:
            import ssl  # imported only when it is needed, because it is slow

            self._tls = ssl.create_default_context()
        return self._tls

    def release(self, connection: Connection) -> None:
        """Return a connection to the pool; one whose answer was not read completely is closed."""
        surplus: Connection | None = connection
        if connection.can_reuse:
            with self._lock:
                if not self._is_closed:
                    self._idle.append(connection)
                    surplus = self._idle.pop(0) if len(self._idle) > IDLE_CONNECTIONS_MAX else None
        if surplus is not None:
            surplus.close()

    def close(self) -> None:
        with self._lock:
            self._is_closed = True
            idle, self._idle = self._idle, []
        for connection in idle:
            connection.close()


class Body:
    """Gathers an answer's body, of a limited size, while it arrives."""

    def __init__(self, bytes_max: int) -> None:
        self._bytes_max = bytes_max
        self._pieces: list[bytes] = []
        self._size = 0

    def take(self, parser: AnswerParser) -> bool:
        """Add what has arrived; returns whether the body is complete."""
        piece = parser.take()
        self._size += len(piece)
        if self._size > self._bytes_max:
            raise BadAnswer(f"the answer is longer than {self._bytes_max} bytes", hint="read it in pieces")
        if piece:
            self._pieces.append(piece)
        return parser.is_complete

    def joined(self) -> bytes:
        return self._pieces[0] if len(self._pieces) == 1 else b"".join(self._pieces)


def _connected(origin: Origin, timeout: float, tls: ssl.SSLContext | None) -> socket.socket:
    plain = socket.create_connection((origin.host, origin.port), timeout)
    try:
        plain.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        return plain if tls is None else tls.wrap_socket(plain, server_hostname=origin.host)
    except OSError:
        plain.close()
        raise


def is_readable(descriptor: int) -> bool:
    poll = select.poll()
    poll.register(descriptor, select.POLLIN)
    return bool(poll.poll(0))


def reason_of(error: OSError) -> str:
    return error.strerror or str(error) or type(error).__name__


def remedy_of(error: OSError) -> str:
    """A hint for a connection that could not be made."""
    said = str(error)
    if "CERTIFICATE_VERIFY_FAILED" in said:
        return "name the authority that signed its certificate: ssl_context=, or --cacert FILE on the command line"
    if "WRONG_VERSION_NUMBER" in said:
        return "the server seems to speak plain HTTP: write http://"
    return "is the server running, and is this its address?"
