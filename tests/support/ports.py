"""Ports for processes that must be told theirs before they start.

They lie below the range from which the system gives ports to outgoing connections and to port 0, so nothing takes one
between the moment it is chosen and the moment the process listens, however many tests run beside this one.
"""

from __future__ import annotations

import random
import socket

FIRST, LAST = 10_000, 32_000

_given: set[int] = set()
_random = random.Random()


def free_port() -> int:
    while True:
        port = _random.randint(FIRST, LAST)
        if port not in _given and _is_free(port):
            _given.add(port)
            return port


def free_ports(number: int) -> list[int]:
    return [free_port() for _ in range(number)]


def _is_free(port: int) -> bool:
    with socket.socket() as probe:
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return False
    return True
