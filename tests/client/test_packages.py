"""The published distributions: no file in both, none left out, and the client runs from its own alone."""

from __future__ import annotations

import shutil
import subprocess
import sys
import zipfile
from email.parser import Parser
from pathlib import Path

import msgspec
import pytest

from millstream import __version__
from support.server import ServerProcess

ROOT = Path(__file__).parents[2]
CLIENT_BYTES_MAX = 1 << 20

SCRIPT = """
import asyncio, importlib.util, sys
from millstream.client import AsyncClient, Client, Stream

url = sys.argv[1]
with Client(url) as client:
    stream = client.stream("packages/light")
    stream.create(content_type="application/json")
    with client.producer(stream, "p") as producer:
        producer.append({"n": 1})
    stream.append({"n": 2})

async def main():
    async with AsyncClient(url) as client:
        return [value async for value in client.stream("packages/light").read_json()]

assert asyncio.run(main()) == [{"n": 1}, {"n": 2}]
with Stream(f"{url}/v1/stream/packages/light") as stream:
    print([chunk.json() for chunk in stream.follow(until_up_to_date=True)])
assert importlib.util.find_spec("pyarrow") is None and importlib.util.find_spec("millstream.server") is None
"""


@pytest.fixture(scope="module")
def wheels(tmp_path_factory: pytest.TempPathFactory) -> tuple[zipfile.ZipFile, zipfile.ZipFile]:
    """The client's and the server's."""
    folder = tmp_path_factory.mktemp("dist")
    build = [sys.executable, str(ROOT / "scripts" / "build_packages.py"), str(folder)]
    subprocess.run(build, check=True, capture_output=True)
    assert len(list(folder.glob("*.tar.gz"))) == 2
    (client,), (server,) = folder.glob("millstream_client-*.whl"), folder.glob("millstream-*.whl")
    return zipfile.ZipFile(client), zipfile.ZipFile(server)


def files(wheel: zipfile.ZipFile) -> set[str]:
    return {name for name in wheel.namelist() if ".dist-info/" not in name}


def requirements(wheel: zipfile.ZipFile) -> list[str]:
    (name,) = (name for name in wheel.namelist() if name.endswith(".dist-info/METADATA"))
    found = Parser().parsestr(wheel.read(name).decode()).get_all("Requires-Dist") or []
    return [requirement for requirement in found if "extra ==" not in requirement]


def test_every_file_is_in_one_of_the_two(wheels: tuple[zipfile.ZipFile, zipfile.ZipFile]) -> None:
    client, server = map(files, wheels)
    listed = subprocess.run(["git", "ls-files", "src"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    assert client | server == {name.removeprefix("src/") for name in listed.splitlines()}
    assert client & server == set()


def test_the_server_needs_the_client_of_its_own_version(wheels: tuple[zipfile.ZipFile, zipfile.ZipFile]) -> None:
    client, server = map(requirements, wheels)
    assert client == ["msgspec>=0.19"]
    assert f"millstream-client=={__version__}" in server and any(name.startswith("pyarrow") for name in server)


def test_the_client_runs_from_its_wheel_and_msgspec_alone(
    wheels: tuple[zipfile.ZipFile, zipfile.ZipFile], shared_server: ServerProcess, tmp_path: Path
) -> None:
    site = tmp_path / "site"
    wheels[0].extractall(site)
    assert sum(file.stat().st_size for file in site.rglob("*") if file.is_file()) < CLIENT_BYTES_MAX
    shutil.copytree(Path(msgspec.__file__).parent, site / "msgspec")
    run = subprocess.run(
        # -S leaves this environment's own packages out.
        [sys.executable, "-S", "-c", SCRIPT, shared_server.url],
        env={"PYTHONPATH": str(site)},
        cwd=tmp_path,
        capture_output=True,
        text=True,
    )
    assert (run.returncode, run.stdout.strip()) == (0, "[[{'n': 1}, {'n': 2}]]"), run.stderr


def test_the_two_together_are_the_whole(wheels: tuple[zipfile.ZipFile, zipfile.ZipFile], tmp_path: Path) -> None:
    """Unpacked into one folder, as pip does; what they depend on is this environment's."""
    for wheel in wheels:
        wheel.extractall(tmp_path)
    run = subprocess.run(
        [sys.executable, "-m", "millstream", "--version"],
        env={"PYTHONPATH": str(tmp_path)},
        cwd=tmp_path,
        capture_output=True,
        text=True,
    )
    assert run.returncode == 0 and __version__ in run.stdout, run.stderr
