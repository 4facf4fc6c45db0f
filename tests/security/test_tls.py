"""TLS in the server: what it speaks, live reads through it, and a new certificate on SIGHUP."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import ssl
import time
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlsplit

import httpx
import pytest

from millstream.client import Client
from support.access import make_certificate
from support.server import ServerProcess

TEXT = {"content-type": "text/plain"}
PATH = "/v1/stream/tls/s"


@pytest.fixture
def secured(tmp_path: Path) -> Iterator[tuple[ServerProcess, ssl.SSLContext, Path]]:
    cert, key = make_certificate(tmp_path)
    settings = (f"tls.cert={cert}", f"tls.key={key}", "http.header_timeout=2s")
    with ServerProcess(tmp_path / "data", settings=settings) as server:
        yield server, ssl.create_default_context(cafile=str(cert)), tmp_path
        assert "Traceback" not in server.stderr()


def certificate_of(server: ServerProcess) -> bytes:
    parts = urlsplit(server.url)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    with (
        socket.create_connection((parts.hostname, parts.port), timeout=10) as raw,
        context.wrap_socket(raw) as connection,
    ):
        return connection.getpeercert(binary_form=True) or b""


def test_streams_work_over_tls_and_urls_say_https(
    secured: tuple[ServerProcess, ssl.SSLContext, Path],
) -> None:
    server, trust, _ = secured
    created = httpx.put(server.url + PATH, headers=TEXT, verify=trust)
    assert created.status_code == 201
    assert created.headers["location"] == f"{server.url}{PATH}"
    with Client(server.url, ssl_context=trust) as client:
        stream = client.stream("tls/s")
        body = os.urandom(3 << 20)
        end = stream.append(body).next_offset
        assert stream.read_all() == body
        with stream.follow(end, mode="sse") as following:
            stream.append(b"live")
            assert next(chunk.data for chunk in following if chunk.data) == b"live"


def test_an_answer_that_ends_its_connection_arrives_whole(
    secured: tuple[ServerProcess, ssl.SSLContext, Path],
) -> None:
    server, trust, _ = secured
    with httpx.Client(base_url=server.url, verify=trust) as client:
        started = time.monotonic()
        assert client.get("/healthz", headers={"connection": "close"}).json()["status"] == "ok"
        assert client.post(PATH, content=bytes(9 << 20), headers=TEXT).status_code == 413
        assert time.monotonic() - started < 5


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_plain_http_and_old_tls_are_turned_away(secured: tuple[ServerProcess, ssl.SSLContext, Path]) -> None:
    server, _, _ = secured
    with pytest.raises(httpx.TransportError):
        httpx.get(server.url.replace("https", "http") + "/healthz")
    parts = urlsplit(server.url)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    context.set_ciphers("ALL:@SECLEVEL=0")
    context.minimum_version = ssl.TLSVersion.MINIMUM_SUPPORTED
    context.maximum_version = ssl.TLSVersion.TLSv1_1
    with socket.create_connection((parts.hostname, parts.port), timeout=10) as raw, pytest.raises(OSError):
        context.wrap_socket(raw)


def test_a_client_that_never_shakes_hands_is_cut_off(secured: tuple[ServerProcess, ssl.SSLContext, Path]) -> None:
    server, _, _ = secured
    parts = urlsplit(server.url)
    with socket.create_connection((parts.hostname, parts.port), timeout=15) as silent:
        assert silent.recv(1) == b""


def test_sighup_takes_a_new_certificate_and_keeps_the_connections(
    secured: tuple[ServerProcess, ssl.SSLContext, Path],
) -> None:
    server, trust, directory = secured
    assert server.process is not None
    cert, key = make_certificate(directory, "renewed")
    trust.load_verify_locations(cafile=str(cert))
    with httpx.Client(base_url=server.url, verify=trust, timeout=20) as client:
        assert client.put(PATH, headers=TEXT).status_code == 201
        with client.stream("GET", PATH, params={"offset": "now", "live": "sse"}) as follower:
            lines = follower.iter_lines()
            before = certificate_of(server)
            shutil.copy(cert, directory / "server.pem")
            # Half of the new pair must not be used: the old one stays until both fit.
            server.process.send_signal(signal.SIGHUP)
            wait_for(server, "tls is left as it was")
            assert certificate_of(server) == before
            shutil.copy(key, directory / "server.key")
            server.process.send_signal(signal.SIGHUP)
            wait_for(server, "the TLS certificate")
            assert certificate_of(server) != before
            assert client.post(PATH, content=b"live", headers=TEXT).status_code == 204
            assert any(line == "data:live" for line in lines)


def wait_for(server: ServerProcess, text: str) -> None:
    deadline = time.monotonic() + 10
    while text not in server.stderr():
        assert time.monotonic() < deadline, server.stderr()
        time.sleep(0.02)
