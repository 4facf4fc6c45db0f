"""Listening to other machines without protection needs to be asked for, and is said."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from millstream.access.exposure import check_exposure
from millstream.config import load
from millstream.errors import ConfigurationError
from support.access import make_certificate
from support.server import PYTHON, ServerProcess


@pytest.mark.parametrize("listen", ["127.0.0.1:0", "127.1.2.3:0", "[::1]:0", "localhost:0"])
def test_loopback_needs_nothing(listen: str) -> None:
    assert check_exposure(load(None, {}, [f"server.listen={listen}"])) is None


@pytest.mark.parametrize("listen", ["0.0.0.0:0", "[::]:0", "192.0.2.1:0", "streams.example:0"])
@pytest.mark.parametrize(
    ("settings", "missing"),
    [((), "[auth]"), (("auth.enabled=true",), "[tls]"), (("tls.cert=c", "tls.key=k"), "[auth]")],
)
def test_elsewhere_both_auth_and_tls_are_demanded(listen: str, settings: tuple[str, ...], missing: str) -> None:
    with pytest.raises(ConfigurationError) as caught:
        check_exposure(load(None, {}, [f"server.listen={listen}", *settings]))
    assert missing in caught.value.message
    assert "--insecure" in (caught.value.hint or "")
    warning = check_exposure(load(None, {}, [f"server.listen={listen}", *settings, "server.insecure=true"]))
    assert warning is not None and missing in warning


def test_elsewhere_with_both_is_fine() -> None:
    settings = ["server.listen=0.0.0.0:0", "auth.enabled=true", "tls.cert=c", "tls.key=k"]
    assert check_exposure(load(None, {}, settings)) is None


def test_the_server_refuses_to_start_exposed_and_says_what_to_do(tmp_path: Path) -> None:
    command = [PYTHON, "-m", "millstream.cli.main", "serve", "--listen", "0.0.0.0:0", "--data-dir", str(tmp_path / "d")]
    refused = subprocess.run(command, capture_output=True, text=True, timeout=30)
    assert refused.returncode == 1
    assert "without [auth]" in refused.stderr and "--insecure" in refused.stderr
    assert not (tmp_path / "d").exists()


def test_insecure_starts_and_says_so(tmp_path: Path) -> None:
    command = (PYTHON, "-m", "millstream.cli.main", "serve", "--insecure")
    server = ServerProcess(tmp_path / "data", command=command)
    server._listen = "0.0.0.0:0"
    with server:
        assert "insecure, as demanded" in server.stderr()
        assert server.stop() == 0


def test_half_a_certificate_is_refused_by_name(tmp_path: Path) -> None:
    cert, _ = make_certificate(tmp_path)
    command = [
        PYTHON,
        "-m",
        "millstream.cli.main",
        "serve",
        "--listen",
        "127.0.0.1:0",
        "--data-dir",
        str(tmp_path / "d"),
    ]
    for settings, message in (
        ([f"tls.cert={cert}"], "tls.key is not set"),
        ([f"tls.cert={cert}", f"tls.key={tmp_path / 'none'}"], "cannot be read"),
        ([f"tls.cert={cert}", f"tls.key={cert}"], "are no certificate and its key"),
    ):
        flags = [flag for setting in settings for flag in ("--set", setting)]
        refused = subprocess.run([*command, *flags], capture_output=True, text=True, timeout=30)
        assert refused.returncode == 1
        assert message in refused.stderr
