"""Connections: reuse, redirects between real servers, TLS, answers that never come, and both clients alike."""

from __future__ import annotations

import contextlib
import inspect
import socket
import ssl
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta
from ipaddress import ip_address
from pathlib import Path
from typing import Any

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from millstream import client as package
from millstream.client import Client, ConnectionFailed, OutcomeUnknown, Producer
from support.clients import Connect
from support.server import ServerProcess

JSON = "application/json"
Handler = Callable[[bytes, socket.socket], None]


@contextlib.contextmanager
def fake_server(*handlers: Handler, tls: ssl.SSLContext | None = None) -> Iterator[tuple[str, list[bytes]]]:
    """A server that treats each connection as its handler says; yields its URL and the requests it was sent."""
    seen: list[bytes] = []
    with socket.create_server(("127.0.0.1", 0)) as listening:

        def serve() -> None:
            for handler in handlers:
                connection, _ = listening.accept()
                connection.settimeout(20)
                with tls.wrap_socket(connection, server_side=True) if tls is not None else connection as open_socket:
                    request = b""
                    while b"\r\n\r\n" not in request:
                        piece = open_socket.recv(65536)
                        if not piece:
                            break
                        request += piece
                    seen.append(request)
                    handler(request, open_socket)

        thread = threading.Thread(target=serve, daemon=True)
        thread.start()
        scheme = "http" if tls is None else "https"
        yield f"{scheme}://127.0.0.1:{listening.getsockname()[1]}", seen
        thread.join(20)


def saying(answer: bytes) -> Handler:
    return lambda request, connection: connection.sendall(answer)


def redirecting(to: str) -> Handler:
    """Sends each request on to the same path at another server, as a node that does not lead does."""

    def redirect(request: bytes, connection: socket.socket) -> None:
        path = request.split(b" ", 2)[1]
        head = b"HTTP/1.1 307 Temporary Redirect\r\nlocation: %b%b\r\n" % (to.encode(), path)
        connection.sendall(head + b"content-length: 0\r\nconnection: close\r\n\r\n")

    return redirect


def hanging_up(request: bytes, connection: socket.socket) -> None:
    """Ends the connection without an answer."""


def test_requests_share_a_connection(connect: Connect) -> None:
    answer = b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\n{}"

    def twice(request: bytes, connection: socket.socket) -> None:
        connection.sendall(answer)
        assert b"/cluster/hot-cold-stats" in connection.recv(65536)
        connection.sendall(answer)

    with fake_server(twice) as (url, _):
        client = connect(url)
        assert client.health() == client.stats() == {}


def test_a_connection_that_was_let_go_is_not_used_for_an_append(connect: Connect) -> None:
    """An append cannot be repeated, so it must not be risked on a connection whose end is already here."""
    answer = b"HTTP/1.1 204 No Content\r\nstream-next-offset: 7\r\n\r\n"
    with fake_server(saying(answer), saying(answer)) as (url, _):
        stream = connect(url).stream("a")
        for _ in range(2):
            assert stream.append(b"x", content_type="text/plain").next_offset == "7"
            threading.Event().wait(0.2)  # the fake server ends the connection meanwhile


def test_redirects_lead_writers_and_followers_to_the_other_server(connect: Connect, server: ServerProcess) -> None:
    with Client(server.url) as direct:
        stream = direct.stream("team/led")
        stream.create(content_type=JSON)
        stream.append(["first"])
    with fake_server(redirecting(server.url), redirecting(server.url)) as (url, seen):
        client = connect(url, token="secret")
        led = client.stream("team/led")
        led.append(["second"], producer=Producer("p", 0, 0))  # after a question for the content type
        led.append(["third"], close=True)
        assert [value for chunk in led.follow() for value in chunk.json()] == ["first", "second", "third"]
        other = client.stream("team/other")
        other.create(content_type=JSON)
        assert other.head().content_type == JSON
    assert [request.split(b" ", 2)[:2] for request in seen] == [
        [b"HEAD", b"/v1/stream/team/led"],
        [b"PUT", b"/v1/stream/team/other"],
    ]
    assert all(b"authorization: Bearer secret" in request for request in seen)


def test_an_append_that_must_be_written_once_is_repeated(connect: Connect) -> None:
    answer = b"HTTP/1.1 204 No Content\r\nproducer-seq: 0\r\nconnection: close\r\n\r\n"
    with fake_server(hanging_up, saying(answer)) as (url, seen):
        assert connect(url).stream("a").append(b"x", content_type="text/plain", once=True).duplicate
    producers = [line for request in seen for line in request.split(b"\r\n") if line.startswith(b"producer-id: once-")]
    assert len(producers) == 2 and producers[0] == producers[1]


def test_an_append_without_an_answer_is_unknown_and_not_repeated(connect: Connect) -> None:
    with fake_server(hanging_up) as (url, seen):
        with pytest.raises(OutcomeUnknown) as unknown:
            connect(url).stream("a").append(b"x", content_type="text/plain")
        assert "producer" in (unknown.value.hint or "")
    assert len(seen) == 1


def test_a_silent_server_is_given_up(connect: Connect) -> None:
    released = threading.Event()
    with fake_server(lambda *_: released.wait(20) and None) as (url, _):
        with pytest.raises(ConnectionFailed, match=r"said nothing for 0\.3 s"):
            connect(url, timeout=0.3, retries=0).health()
        released.set()


def test_an_answer_cut_short_is_asked_for_again(connect: Connect) -> None:
    whole = b'HTTP/1.1 200 OK\r\ncontent-length: 15\r\n\r\n{"status":"ok"}'
    with fake_server(saying(whole[:-3]), saying(whole)) as (url, _):
        assert connect(url).health() == {"status": "ok"}


def test_a_client_that_is_closed_says_so(connect: Connect, shared_server: ServerProcess) -> None:
    client = connect(shared_server.url, retries=0)
    client.health()
    client.close()
    with pytest.raises(ConnectionFailed, match="the client is closed"):
        client.health()


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A certificate for 127.0.0.1 that vouches for itself, with its key in the same file."""
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "localhost")])
    now = datetime.now(UTC)
    built = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - timedelta(days=1))
        .not_valid_after(now + timedelta(days=1))
        .add_extension(x509.SubjectAlternativeName([x509.IPAddress(ip_address("127.0.0.1"))]), critical=False)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .sign(key, hashes.SHA256())
    )
    path = tmp_path_factory.mktemp("tls") / "both.pem"
    path.write_bytes(
        built.public_bytes(serialization.Encoding.PEM)
        + key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    )
    return path


def test_tls_is_spoken_to_servers_that_can_prove_themselves(connect: Connect, certificate: Path) -> None:
    server_side = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    server_side.load_cert_chain(certificate)
    trusting = ssl.create_default_context(cafile=str(certificate))
    answer = b'HTTP/1.1 200 OK\r\ncontent-length: 15\r\nconnection: close\r\n\r\n{"status":"ok"}'
    with fake_server(saying(answer), tls=server_side) as (url, _):
        assert connect(url, ssl_context=trusting).health() == {"status": "ok"}


def test_a_certificate_nobody_vouches_for_is_refused(connect: Connect, certificate: Path) -> None:
    server_side = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    server_side.load_cert_chain(certificate)
    with socket.create_server(("127.0.0.1", 0)) as listening:

        def serve() -> None:
            connection, _ = listening.accept()
            with contextlib.suppress(OSError), server_side.wrap_socket(connection, server_side=True):
                pass

        thread = threading.Thread(target=serve, daemon=True)
        thread.start()
        with pytest.raises(ConnectionFailed, match="certificate verify failed"):
            connect(f"https://127.0.0.1:{listening.getsockname()[1]}", retries=0).health()
        thread.join(10)


@pytest.mark.parametrize(
    ("blocking", "awaited"),
    [
        (package.Client, package.AsyncClient),
        (package.Stream, package.AsyncStream),
        (package.Bucket, package.AsyncBucket),
        (package.IdempotentProducer, package.AsyncIdempotentProducer),
        (package.Following, package.AsyncFollowing),
    ],
)
def test_both_clients_have_the_same_methods(blocking: type, awaited: type) -> None:
    def methods(kind: type) -> dict[str, list[tuple[str, Any]]]:
        return {
            name: [(parameter.name, parameter.default) for parameter in inspect.signature(method).parameters.values()]
            for name, method in inspect.getmembers(kind, callable)
            if not name.startswith("_") or name == "__init__"
        }

    assert methods(blocking) == methods(awaited)


def test_importing_the_client_brings_nothing_heavy() -> None:
    script = (
        "import sys, millstream.client; "
        "print(sorted({'pyarrow', 'obstore', 'lmdb', 'httptools', 'uvloop', 'asyncio', 'ssl', 'cryptography'}"
        " & set(sys.modules)), [name for name in sys.modules if name.startswith('millstream.server')])"
    )
    assert subprocess.run([sys.executable, "-c", script], capture_output=True, text=True).stdout == "[] []\n"
