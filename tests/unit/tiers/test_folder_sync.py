"""Files and their names reach the disk, and those who wait together share the sync of a folder."""

from __future__ import annotations

import asyncio
import os
import threading
from pathlib import Path

import pytest

from millstream.tiers.folder_sync import FolderSync


class Disk:
    """Passes syncs on to the real disk, notes what was asked, and can be held up at a folder."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, held: Path) -> None:
        self.synced: list[Path] = []
        self.reached = threading.Event()
        self.go_on = threading.Event()
        self._held = held
        self._fsync = os.fsync
        monkeypatch.setattr(os, "fsync", self._sync)

    def _sync(self, descriptor: int) -> None:
        path = Path(f"/proc/self/fd/{descriptor}").readlink()
        self.synced.append(path)
        if path == self._held:
            self.reached.set()
            assert self.go_on.wait(20)
        self._fsync(descriptor)


def written(path: Path) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(b"x")
    return path


def test_file_and_every_folder_up_to_the_root_are_synced_in_that_order(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    disk = Disk(monkeypatch, Path("/nowhere"))
    path = written(tmp_path / "root/a/b/file")
    asyncio.run(FolderSync(tmp_path / "root").sync(path))
    assert disk.synced == [path, path.parent, path.parent.parent, tmp_path / "root"]


def test_those_who_come_while_a_folder_is_synced_share_the_next_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    disk = Disk(monkeypatch, tmp_path)

    async def scenario() -> None:
        sync = FolderSync(tmp_path)
        waiting: list[Path] = []
        sync_folder = sync._sync_folder

        async def noted(folder: Path) -> None:
            waiting.append(folder)
            await sync_folder(folder)

        monkeypatch.setattr(sync, "_sync_folder", noted)
        first = asyncio.ensure_future(sync.sync(written(tmp_path / "first")))
        await asyncio.to_thread(disk.reached.wait, 20)
        later = [asyncio.ensure_future(sync.sync(written(tmp_path / f"later-{number}"))) for number in range(10)]
        while len(waiting) < 11:  # the files themselves need not wait
            await asyncio.sleep(0.001)
        later.pop().cancel()
        assert disk.synced.count(tmp_path) == 1, "one sync of the folder at a time"
        assert not any(one.done() and not one.cancelled() for one in (first, *later))
        disk.go_on.set()
        await asyncio.gather(first, *later)

    asyncio.run(scenario())
    assert disk.synced.count(tmp_path) == 2


def test_a_sync_that_fails_says_so_and_leaves_the_next_alone(tmp_path: Path) -> None:
    async def scenario() -> None:
        root = tmp_path / "root"
        sync = FolderSync(root)
        path = written(root / "file")
        path.unlink()
        with pytest.raises(FileNotFoundError):
            await sync.sync(path)
        await sync.sync(written(path))

    asyncio.run(scenario())
