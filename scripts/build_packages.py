"""The two distributions that are published, as wheels and sdists: `make packages`.

`millstream-client` has the client and what it imports; `millstream` has everything else and depends on it, at the same
version. Each is built from a folder of its own with its part of `src/`, so no file is in both (ADR 20). A checkout, and
an installation of it (`pip install .`), is one distribution with all of it.
"""

from __future__ import annotations

import argparse
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).parents[1]
PACKAGE: Final = ROOT / "src" / "millstream"

# Below src/millstream: what the client's distribution owns.
MODULES: Final = ("__init__.py", "caches.py", "clock.py", "errors.py", "tasks.py", "units.py", "py.typed")
CLIENT_PARTS: Final = (*MODULES, "client", "protocol")
DOCUMENTS: Final = ("LICENSE", "README.md", "CHANGELOG.md")
HOOKS: Final = """
import sys
from setuptools import build_meta
output = sys.argv[1]  # which the hooks change
build_meta.build_sdist(output)
build_meta.build_wheel(output)
"""
IGNORED: Final = shutil.ignore_patterns("__pycache__", "*.pyc", "*.egg-info")

CLIENT_PROJECT: Final = """\
[build-system]
requires = ["setuptools>=77"]
build-backend = "setuptools.build_meta"

[project]
name = "millstream-client"
version = "{version}"
description = "The Python client of millstream, for every server of the Durable Streams protocol."
readme = "README.md"
requires-python = ">=3.11"
license = "Apache-2.0"
license-files = ["LICENSE"]
keywords = ["durable streams", "event log", "http", "server-sent events", "client"]
classifiers = [
    "Development Status :: 4 - Beta",
    "Framework :: AsyncIO",
    "Intended Audience :: Developers",
    "Programming Language :: Python :: 3",
    "Programming Language :: Python :: 3 :: Only",
    "Programming Language :: Python :: 3.11",
    "Typing :: Typed",
]
dependencies = ["msgspec>=0.19"]

[project.urls]
Protocol = "https://github.com/durable-streams/durable-streams"

[tool.setuptools.packages.find]
where = ["src"]

[tool.setuptools.package-data]
millstream = ["py.typed"]
"""


def version() -> str:
    found = re.search(r'__version__ = "([^"]+)"', (PACKAGE / "__init__.py").read_text())
    assert found is not None, "millstream/__init__.py names no version"
    return found[1]


def client_tree(folder: Path) -> None:
    package = folder / "src" / "millstream"
    package.mkdir(parents=True)
    for name in CLIENT_PARTS:
        source = PACKAGE / name
        if source.is_dir():
            shutil.copytree(source, package / name, ignore=IGNORED)
        else:
            shutil.copy(source, package / name)
    shutil.copy(ROOT / "LICENSE", folder)
    shutil.copy(ROOT / "docs" / "client.md", folder / "README.md")
    (folder / "pyproject.toml").write_text(CLIENT_PROJECT.format(version=version()))


def server_tree(folder: Path) -> None:
    package = folder / "src" / "millstream"
    shutil.copytree(ROOT / "src", folder / "src", ignore=IGNORED)
    for name in CLIENT_PARTS:
        part = package / name
        if part.is_dir():
            shutil.rmtree(part)
        else:
            part.unlink()
    for name in DOCUMENTS:
        shutil.copy(ROOT / name, folder)
    (folder / "pyproject.toml").write_text(server_project((ROOT / "pyproject.toml").read_text()))


def server_project(text: str) -> str:
    """The checkout's own pyproject.toml, with the client as a dependency and the version, which its package has."""
    for old, new in (
        ('dynamic = ["version"]\n', f'version = "{version()}"\n'),
        ("\ndependencies = [\n", f'\ndependencies = [\n    "millstream-client=={version()}",\n'),
        ('[tool.setuptools.dynamic]\nversion = { attr = "millstream.__version__" }\n', ""),
    ):
        assert text.count(old) == 1, f"pyproject.toml has changed: {old!r}"
        text = text.replace(old, new)
    return text


def build(output: Path) -> None:
    """Build both into a folder, with the setuptools of this environment."""
    output.mkdir(parents=True, exist_ok=True)
    for make_tree in (client_tree, server_tree):
        with tempfile.TemporaryDirectory() as folder:
            make_tree(Path(folder))
            subprocess.run(
                [sys.executable, "-c", HOOKS, str(output)], cwd=folder, check=True, stdout=subprocess.DEVNULL
            )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("output", type=Path, nargs="?", default=ROOT / "dist")
    build(parser.parse_args().output.resolve())
