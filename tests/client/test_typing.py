"""A user's script is clean under the type checkers that users have."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).with_name("user_script.py")
PYRIGHT = SCRIPT.parents[1] / "conformance" / "node_modules" / ".bin" / "pyright"


def test_mypy_finds_nothing_in_a_users_script(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(SCRIPT.read_text())
    run = subprocess.run(
        [
            sys.executable,
            "-m",
            "mypy",
            "--strict",
            "--config-file=",
            "--cache-dir",
            str(tmp_path / "cache"),
            "script.py",
        ],
        cwd=tmp_path,
        capture_output=True,
        text=True,
    )
    assert run.returncode == 0, run.stdout + run.stderr


@pytest.mark.skipif(not PYRIGHT.exists(), reason="pyright is not installed: npm install in tests/conformance")
def test_pyright_finds_nothing_in_a_users_script(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(SCRIPT.read_text())
    settings = {"typeCheckingMode": "strict", "include": ["script.py"]}
    (tmp_path / "pyrightconfig.json").write_text(json.dumps(settings))
    run = subprocess.run(
        [str(PYRIGHT), "--pythonpath", sys.executable, "--project", str(tmp_path)],
        cwd=tmp_path,
        capture_output=True,
        text=True,
    )
    assert run.returncode == 0, run.stdout + run.stderr
