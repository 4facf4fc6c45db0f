"""Where the logs of a restored cluster begin. `millstream restore` leaves it in the data directory of the node that
begins the cluster again, as `restored.json`; from then on it is among what all nodes agree on (`Settings.origins`).

Positions go on where the object store's end: a log that began at one again would give them a second meaning.
"""

from __future__ import annotations

from pathlib import Path
from typing import Final

import msgspec

from millstream.errors import Corrupt
from millstream.streams.records import StoreClaimed

NAME: Final = "restored.json"


class Origins(msgspec.Struct, frozen=True):
    """For each shard, by its number, the first position that its new log takes."""

    cluster: str
    positions: list[int]
    # The restore's claims of the shards' parts of the object store; none for shards that were never flushed.
    claims: list[StoreClaimed | None] = []


def read_origins(data_dir: Path) -> Origins | None:
    path = data_dir / NAME
    try:
        return msgspec.json.decode(path.read_bytes(), type=Origins)
    except FileNotFoundError:
        return None
    except msgspec.MsgspecError as error:
        raise Corrupt(f"{path} cannot be read: {error}", hint="empty the data directory and restore again") from None


def write_origins(data_dir: Path, origins: Origins) -> None:
    unfinished = data_dir / f"{NAME}.unfinished"
    unfinished.write_bytes(msgspec.json.encode(origins))
    unfinished.rename(data_dir / NAME)


def forget_origins(data_dir: Path) -> None:
    (data_dir / NAME).unlink(missing_ok=True)
