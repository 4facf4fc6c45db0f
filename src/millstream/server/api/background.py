"""Background work for a request that waits for the object store; it is cancelled when the client disconnects."""

from __future__ import annotations

from collections.abc import Coroutine
from typing import Any, Final, TypeVar

from millstream.pending import BackgroundTasks, Pending

T = TypeVar("T")

_tasks: Final = BackgroundTasks()


def in_background(work: Coroutine[Any, Any, T]) -> Pending[T]:
    return _tasks.run(work, cancels=True)
