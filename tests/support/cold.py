"""What tests of the cold tier share: the store under a server, waiting for flushes, and the command line."""

from __future__ import annotations

import asyncio
import contextlib
import io
import json
import os
import subprocess
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, Protocol
from unittest import mock

import httpx

from millstream.cli.main import main
from millstream.tiers.objects import Objects, ObjectStoreSettings, open_objects
from support.s3 import S3Server
from support.server import PYTHON, ServerProcess

SECONDS = 30.0


class ColdStore(Protocol):
    """Where a test's server keeps its cold tier, and how the test looks at it from outside."""

    settings: tuple[str, ...]
    environment: dict[str, str]

    def objects(self) -> Objects: ...

    def listing(self) -> dict[str, int]: ...


class FolderStore:
    def __init__(self, folder: Path) -> None:
        self.environment: dict[str, str] = {}
        self.folder = folder
        self.settings: tuple[str, ...] = (f"cold.path={folder}",)

    def objects(self) -> Objects:
        return open_objects(ObjectStoreSettings("fs", self.folder, {}))

    def listing(self) -> dict[str, int]:
        sizes = {}
        for path in self.folder.rglob("*"):
            with suppress(FileNotFoundError):  # the server deletes some meanwhile
                if path.is_file():
                    sizes[str(path.relative_to(self.folder))] = path.stat().st_size
        return sizes


class S3Prefix:
    def __init__(self, server: S3Server) -> None:
        self.server = server
        self.prefix = server.new_prefix()
        self.settings: tuple[str, ...] = server.settings(self.prefix)
        self.environment: dict[str, str] = server.environment

    def objects(self) -> Objects:
        return open_objects(ObjectStoreSettings("s3", Path(self.prefix), self.server.options))

    def listing(self) -> dict[str, int]:
        return self.server.listing(self.prefix)


def names(store: ColdStore, folder: str) -> set[str]:
    return {path for path in store.listing() if path.startswith(f"{folder}/")}


def read_object(store: ColdStore, path: str) -> bytes:
    return asyncio.run(store.objects().get(path))


def delete_object(store: ColdStore, path: str) -> None:
    asyncio.run(store.objects().delete(path))


def put_object(store: ColdStore, path: str, data: bytes) -> None:
    asyncio.run(store.objects().put(path, data))


def wait_until(condition: Callable[[], object], what: str, seconds: float = SECONDS) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"not within {seconds} s: {what}"
        time.sleep(0.02)


def stats(client: httpx.Client) -> dict[str, Any]:
    answer = client.get("/cluster/hot-cold-stats")
    assert answer.status_code == 200, answer.text
    return dict(answer.json())


def is_flushed(client: httpx.Client) -> bool:
    """Whether everything that has happened is cold, and the catalog says so too."""
    now = stats(client)
    is_sealed = now["flushed_position"] >= now["last_position"] and now["flush_backlog_bytes"] == 0
    return is_sealed and not now["flush_in_progress"]


def wait_until_flushed(client: httpx.Client, *, released: bool = False, seconds: float = SECONDS) -> None:
    """Wait for the flush of all there is; with `released` also until memory holds nothing of it."""
    if released:
        wait_until(lambda: is_flushed(client) and stats(client)["hot_bytes"] == 0, "a flush that frees memory", seconds)
    else:
        wait_until(lambda: is_flushed(client), "a flush", seconds)


def server_on(data_dir: Path, store: ColdStore, *settings: str) -> ServerProcess:
    return ServerProcess(data_dir, settings=(*store.settings, *settings), environment=store.environment)


def run_command(
    *arguments: str, data_dir: Path, store: ColdStore | None = None, settings: tuple[str, ...] = ()
) -> subprocess.CompletedProcess[str]:
    """`millstream …` as a user runs it."""
    command = [PYTHON, "-m", "millstream.cli.main", *arguments, "--data-dir", str(data_dir)]
    for setting in (*(store.settings if store is not None else ()), *settings):
        command += ["--set", setting]
    environment = {**os.environ, **(store.environment if store is not None else {})}
    return subprocess.run(command, capture_output=True, text=True, timeout=60, env=environment)


def run_here(*arguments: str, data_dir: Path, store: ColdStore) -> tuple[int, str, str]:
    """The same in this process, which is faster: exit code, output, errors."""
    command = [*arguments, "--data-dir", str(data_dir)]
    for setting in store.settings:
        command += ["--set", setting]
    output, errors = io.StringIO(), io.StringIO()
    with (
        mock.patch.dict(os.environ, store.environment),
        contextlib.redirect_stdout(output),
        contextlib.redirect_stderr(errors),
    ):
        code = main(command)
    return code, output.getvalue(), errors.getvalue()


def run_json(*arguments: str, data_dir: Path, store: ColdStore, code: int = 0) -> Any:
    found, output, errors = run_here(*arguments, "--json", data_dir=data_dir, store=store)
    assert found == code, (output, errors)
    return json.loads(output)


def verified(data_dir: Path, store: ColdStore) -> dict[str, Any]:
    """What `cold verify` says, whatever its exit code; whatever is left over counts as old."""
    strictly = ("--set", "cold.leftover_age=0s")
    code, output, errors = run_here("cold", "verify", "--json", *strictly, data_dir=data_dir, store=store)
    assert code in (0, 1) and output, (output, errors)
    report: dict[str, Any] = json.loads(output)
    assert (code == 1) is bool(report["problems"])
    return report


def read_all(client: httpx.Client, path: str, offset: str = "-1") -> bytes:
    """The whole content, chunk by chunk; of JSON streams the elements as they were sent, one a line."""
    content = b""
    for _ in range(100_000):
        answer = client.get(path, params={"offset": offset})
        assert answer.status_code == 200, answer.text
        content += answer.content
        offset = answer.headers["stream-next-offset"]
        if answer.headers.get("stream-up-to-date") == "true":
            return content
    raise AssertionError(f"{path} does not end")


def token(offset: int) -> str:
    return f"0000000000000000_{offset:016d}"
