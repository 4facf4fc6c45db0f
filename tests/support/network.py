"""Network namespaces for the nodes of a cluster: what separates machines, on one machine.

Each node has two cables: one to its clients and the object store, one to the other nodes. `cut_off` takes the second
out of its switch: what is sent is lost, nobody is told, and connections stay open.
"""

from __future__ import annotations

import os
import subprocess
from functools import cache

FRONT = "10.213"
BACK = "10.214"
HOST = 254


class Network:
    """Needs to be root, as `is_available` finds out."""

    def __init__(self, nodes: int) -> None:
        self._tag = f"ms{os.getpid() % 0xFFFF:x}"
        self._net = os.getpid() % 250
        self._nodes = range(1, nodes + 1)
        self.host = f"{FRONT}.{self._net}.{HOST}"

    def __enter__(self) -> Network:
        try:
            for side in ("f", "b"):
                _ip("link", "add", f"{self._tag}{side}", "type", "bridge")
                _ip("link", "set", "dev", f"{self._tag}{side}", "up")
            _ip("addr", "add", f"{self.host}/24", "dev", f"{self._tag}f")
            for number in self._nodes:
                self._plug_in(number)
        except BaseException:
            self.__exit__()
            raise
        return self

    def _plug_in(self, number: int) -> None:
        namespace = self._namespace(number)
        _ip("netns", "add", namespace)
        _ip("-n", namespace, "link", "set", "dev", "lo", "up")
        for side, address in (("f", self.front(number)), ("b", self.back(number))):
            cable = f"{self._tag}{side}{number}"
            _ip("link", "add", cable, "type", "veth", "peer", "name", side, "netns", namespace)
            _ip("link", "set", "dev", cable, "master", f"{self._tag}{side}", "up")
            _ip("-n", namespace, "addr", "add", f"{address}/24", "dev", side)
            _ip("-n", namespace, "link", "set", "dev", side, "up")

    def __exit__(self, *exc: object) -> None:
        for number in self._nodes:
            _try_ip("netns", "del", self._namespace(number))
        for side in ("f", "b"):
            for number in self._nodes:
                _try_ip("link", "del", f"{self._tag}{side}{number}")  # a process that is just ending keeps it a while
            _try_ip("link", "del", f"{self._tag}{side}")

    def _namespace(self, number: int) -> str:
        return f"{self._tag}-{number}"

    def front(self, number: int) -> str:
        """Where clients reach a node."""
        return f"{FRONT}.{self._net}.{number}"

    def back(self, number: int) -> str:
        """Where the other nodes do."""
        return f"{BACK}.{self._net}.{number}"

    def inside(self, number: int) -> tuple[str, ...]:
        """What a command begins with that runs on a node."""
        return ("ip", "netns", "exec", self._namespace(number))

    def cut_off(self, number: int) -> None:
        _ip("link", "set", "dev", f"{self._tag}b{number}", "nomaster")

    def mend(self) -> None:
        for number in self._nodes:
            _ip("link", "set", "dev", f"{self._tag}b{number}", "master", f"{self._tag}b")


@cache
def is_available() -> bool:
    """Whether this machine lets us have namespaces, cables and switches."""
    try:
        with Network(1) as network:
            subprocess.run([*network.inside(1), "true"], check=True, capture_output=True)
        return True
    except (OSError, subprocess.CalledProcessError):
        return False


def _ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, capture_output=True, text=True)


def _try_ip(*arguments: str) -> None:
    try:
        _ip(*arguments)
    except (OSError, subprocess.CalledProcessError):
        return
