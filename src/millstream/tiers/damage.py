"""What was found missing or damaged in the object store: named, logged once, shown in readiness and metrics, and never
served.

Whoever reads an object does so within `noticed`. An object that is not there though something names it is
`ObjectMissing`, which is no "not found" to clients: their stream exists; its bytes are lost, or the store is the wrong
one.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Final

from millstream.errors import Corrupt, NotFound, ObjectMissing

logger = logging.getLogger("millstream.store")

KEPT_MAX: Final = 1000
RETRY_SECONDS: Final = 30


class Damage:
    def __init__(self) -> None:
        # The objects that are known to be missing or damaged now, and what is wrong with each.
        self.objects: dict[str, str] = {}
        self.found_total = 0

    @contextmanager
    def noticed(self, path: str, is_needed: Callable[[], bool] = lambda: True) -> Iterator[None]:
        """Notice what is wrong with an object that is read meanwhile; one that nothing names any more may be gone."""
        try:
            yield
        except NotFound:
            if not is_needed():
                raise
            self.found(path, "it is not in the object store")
            raise missing(path) from None
        except Corrupt as error:
            self.found(path, error.message)
            raise
        else:
            self.objects.pop(path, None)

    def found(self, path: str, reason: str) -> None:
        self.found_total += 1
        if path not in self.objects and len(self.objects) < KEPT_MAX:
            self.objects[path] = reason
            logger.error("the object %s is damaged: %s", path, reason)


def missing(path: str) -> ObjectMissing:
    return ObjectMissing(
        f"the object {path} is not in the object store, though the catalog names it",
        hint="the operator must mend the store: see cold.path, and `millstream cold verify`",
        retry_after_seconds=RETRY_SECONDS,
    )
