"""A real S3 server for tests: SeaweedFS (`weed server -s3`) on free loopback ports, small and bounded."""

from __future__ import annotations

import asyncio
import atexit
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, cast

import httpx
import obstore
from obstore.store import S3Store

from support.ports import free_ports

if TYPE_CHECKING:
    from obstore.store import S3Config

WEED = Path(sys.executable).parent / "weed"
START_SECONDS = 60.0
BUCKET = "millstream-tests"

_prefixes = count(1)


class S3Server:
    """One SeaweedFS process. `stop` and `start` keep the ports and the data, as a restart of a real store would."""

    def __init__(self, directory: Path, host: str = "127.0.0.1") -> None:
        self._directory = directory
        self._log = directory / "weed.log"
        self._host = host
        self._ports = free_ports(8)
        self._process: subprocess.Popen[bytes] | None = None
        self.endpoint = f"http://{host}:{self._ports[0]}"

    @property
    def is_running(self) -> bool:
        return self._process is not None and self._process.poll() is None

    def start(self) -> S3Server:
        assert not self.is_running
        s3, s3_grpc, master, master_grpc, volume, volume_grpc, filer, filer_grpc = self._ports
        data = self._directory / "data"
        data.mkdir(parents=True, exist_ok=True)
        command = [
            str(WEED),
            "server",
            f"-dir={data}",
            f"-ip={self._host}",
            f"-ip.bind={self._host}",
            f"-master.port={master}",
            f"-master.port.grpc={master_grpc}",
            "-master.volumeSizeLimitMB=64",
            "-master.volumePreallocate=false",
            "-master.telemetry=false",
            f"-volume.port={volume}",
            f"-volume.port.grpc={volume_grpc}",
            "-volume.max=16",
            "-volume.minFreeSpace=100MiB",
            f"-filer.port={filer}",
            f"-filer.port.grpc={filer_grpc}",
            "-s3",
            f"-s3.port={s3}",
            f"-s3.port.grpc={s3_grpc}",
            "-s3.port.iceberg=0",
            "-s3.port.lance=0",
        ]
        with self._log.open("ab") as output:
            self._process = subprocess.Popen(command, cwd=self._directory, stdout=output, stderr=output)
        self._wait_until_it_stores()
        return self

    def _wait_until_it_stores(self) -> None:
        """Ready is not when it answers, but when a first object has a volume to go to."""
        deadline = time.monotonic() + START_SECONDS
        while True:
            assert self._process is not None
            if self._process.poll() is not None or time.monotonic() > deadline:
                self.stop()
                raise AssertionError(f"SeaweedFS did not start: {self._log.read_text(errors='replace')[-3000:]}")
            try:
                httpx.put(f"{self.endpoint}/{BUCKET}", timeout=5.0)
                if httpx.put(f"{self.endpoint}/{BUCKET}/ready", content=b"yes", timeout=20.0).status_code == 200:
                    return
            except httpx.TransportError:
                pass
            time.sleep(0.2)

    def stop(self) -> None:
        """End it at once; what it acknowledged is on its disk."""
        if self._process is not None:
            if self._process.poll() is None:
                self._process.send_signal(signal.SIGKILL)
            self._process.wait()
            self._process = None

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Let it answer nothing for a while, as if the network were very slow."""
        assert self._process is not None
        self._process.send_signal(signal.SIGSTOP)
        try:
            yield
        finally:
            self._process.send_signal(signal.SIGCONT)

    def __enter__(self) -> S3Server:
        return self.start()

    def __exit__(self, *exc: object) -> None:
        self.stop()

    # -- for whoever uses it -----------------------------------------------------------------------------------

    def new_prefix(self) -> str:
        """A prefix of its own for each test, so that they share a server and nothing else."""
        return f"test-{next(_prefixes)}"

    def settings(self, prefix: str) -> tuple[str, ...]:
        """What `millstream --set` needs to keep its cold tier here."""
        return (
            "cold.backend=s3",
            f"cold.path={prefix}",
            f"cold.s3_bucket={BUCKET}",
            "cold.s3_region=us-east-1",
            f"cold.s3_endpoint={self.endpoint}",
            "cold.s3_access_key_id=$TEST_S3_KEY",
            "cold.s3_secret_access_key=$TEST_S3_SECRET",
        )

    @property
    def environment(self) -> dict[str, str]:
        """The variables that these settings refer to."""
        return {"TEST_S3_KEY": "any", "TEST_S3_SECRET": "thing"}

    @property
    def options(self) -> dict[str, str]:
        """The same for `ObjectStoreSettings`."""
        return {
            "bucket": BUCKET,
            "region": "us-east-1",
            "endpoint": self.endpoint,
            "access_key_id": "any",
            "secret_access_key": "thing",
        }

    def listing(self, prefix: str) -> dict[str, int]:
        """The objects below a prefix and their sizes, asked of S3 by another way than millstream's."""
        store = S3Store(
            BUCKET,
            prefix=prefix,
            config=cast("S3Config", {name: value for name, value in self.options.items() if name != "bucket"}),
            client_options={"allow_http": True},
        )

        async def collect() -> dict[str, int]:
            return {meta["path"]: meta["size"] async for page in obstore.list(store) for meta in page}

        return asyncio.run(collect())


_shared: list[S3Server] = []


def shared_s3_server() -> S3Server:
    """The one server of a test session, started when first asked for and ended with the process."""
    if not _shared:
        directory = tempfile.TemporaryDirectory(prefix="millstream-s3-", ignore_cleanup_errors=True)
        server = S3Server(Path(directory.name))
        atexit.register(directory.cleanup)
        atexit.register(server.stop)
        _shared.append(server.start())
    if not _shared[0].is_running:
        _shared[0].start()
    return _shared[0]
