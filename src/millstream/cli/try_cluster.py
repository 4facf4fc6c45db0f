"""`make cluster`: three nodes on this machine, over a SeaweedFS bucket, until Ctrl-C. For trying it out."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Final

BUCKET: Final = "millstream"
START_SECONDS: Final = 90.0


def main() -> int:
    directory = Path(os.environ.get("MILLSTREAM_CLUSTER_DIR") or tempfile.mkdtemp(prefix="millstream-cluster-"))
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    processes: list[subprocess.Popen[bytes]] = []
    try:
        endpoint = _start_store(directory, processes)
        urls = _start_nodes(directory, endpoint, processes)
        print("three nodes of the cluster `local` are ready:")
        for number, url in enumerate(urls, 1):
            print(f"  node {number}  {url}  (configuration {directory / f'node{number}.toml'})")
        print(f"look at it with: millstream cluster status --url {urls[0]}\nCtrl-C stops it.", flush=True)
        while all(process.poll() is None for process in processes):
            time.sleep(0.5)
        print("a process has ended; stopping the others")
        return 1
    except KeyboardInterrupt:
        return 0
    finally:
        for process in reversed(processes):
            process.terminate()
        for process in reversed(processes):
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(90)  # the last one finds no majority any more, and waits for it a while
        if "MILLSTREAM_CLUSTER_DIR" not in os.environ:
            shutil.rmtree(directory, ignore_errors=True)


def _start_store(directory: Path, processes: list[subprocess.Popen[bytes]]) -> str:
    ports = _free_ports(8)
    data = directory / "store"
    data.mkdir(parents=True, exist_ok=True)
    names = (
        "s3.port",
        "s3.port.grpc",
        "master.port",
        "master.port.grpc",
        "volume.port",
        "volume.port.grpc",
        "filer.port",
        "filer.port.grpc",
    )
    flags = [f"-{name}={port}" for name, port in zip(names, ports, strict=True)]
    weed = Path(sys.executable).parent / "weed"
    with (directory / "store.log").open("ab") as log:
        processes.append(
            subprocess.Popen(
                [
                    str(weed),
                    "server",
                    f"-dir={data}",
                    "-ip=127.0.0.1",
                    "-ip.bind=127.0.0.1",
                    "-s3",
                    "-filer",
                    "-volume.max=16",
                    "-master.volumeSizeLimitMB=256",
                    *flags,
                ],
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        )
    endpoint = f"http://127.0.0.1:{ports[0]}"
    _wait_for("the object store", lambda: _put(f"{endpoint}/{BUCKET}") and _put(f"{endpoint}/{BUCKET}/ready", b"yes"))
    return endpoint


def _start_nodes(directory: Path, endpoint: str, processes: list[subprocess.Popen[bytes]]) -> list[str]:
    ports, cluster_ports = _free_ports(3), _free_ports(3)
    urls = [f"http://127.0.0.1:{port}" for port in ports]
    for number in (1, 2, 3):
        routes = [f'"127.0.0.1:{port}"' for index, port in enumerate(cluster_ports, 1) if index != number]
        file = directory / f"node{number}.toml"
        file.write_text(
            f'version = 1\n\n[server]\nnode_id = {number}\nlisten = "127.0.0.1:{ports[number - 1]}"\n'
            f'data_dir = "{directory / f"node{number}"}"\n\n[cluster]\nname = "local"\n'
            f'listen = "127.0.0.1:{cluster_ports[number - 1]}"\nroutes = [{", ".join(routes)}]\n'
            'bootstrap_node_id = 1\nshards = 3\nreplicas = 3\nsecret = "for trying it out"\n\n[cold]\nbackend = "s3"\n'
            f's3_bucket = "{BUCKET}"\ns3_region = "us-east-1"\ns3_endpoint = "{endpoint}"\n'
            's3_access_key_id = "any"\ns3_secret_access_key = "thing"\n'
        )
        with (directory / f"node{number}.log").open("ab") as log:
            command = [sys.executable, "-m", "millstream.cli.main", "serve", "--config", str(file)]
            processes.append(subprocess.Popen(command, stdout=log, stderr=log, start_new_session=True))
    for number, url in enumerate(urls, 1):
        _wait_for(f"node {number}", partial(_get, f"{url}/readyz/cluster"))
    return urls


def _wait_for(what: str, is_there: Callable[[], bool]) -> None:
    deadline = time.monotonic() + START_SECONDS
    while not is_there():
        if time.monotonic() > deadline:
            raise SystemExit(f"{what} did not start within {START_SECONDS:.0f} s")
        time.sleep(0.2)


def _get(url: str) -> bool:
    try:
        with urllib.request.urlopen(url, timeout=2.0):
            return True
    except (urllib.error.URLError, OSError):
        return False


def _put(url: str, data: bytes = b"") -> bool:
    try:
        with urllib.request.urlopen(urllib.request.Request(url, data=data, method="PUT"), timeout=20.0):
            return True
    except urllib.error.HTTPError as error:
        return error.code == 409
    except (urllib.error.URLError, OSError):
        return False


def _free_ports(number: int) -> list[int]:
    sockets = [socket.socket() for _ in range(number)]
    try:
        for one in sockets:
            one.bind(("127.0.0.1", 0))
        return [one.getsockname()[1] for one in sockets]
    finally:
        for one in sockets:
            one.close()


if __name__ == "__main__":
    sys.exit(main())
