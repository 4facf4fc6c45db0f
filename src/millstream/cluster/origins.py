"""The first positions of a restored cluster's logs.

`millstream restore` writes them to `restored.json` in the data directory of the node that creates the cluster again;
from then on they are part of the settings that all nodes agree on (`Settings.origins`). Positions continue where those
in the object store end: a log that began at 1 again would use positions twice.
"""

from __future__ import annotations

from pathlib import Path
from typing import Final

import msgspec

from millstream.errors import Corrupt
from millstream.streams.records import StoreClaimed
from millstream.units import Position

NAME: Final = "restored.json"


class Origins(msgspec.Struct, frozen=True):
    """The first position of each shard's new log, by shard number."""

    cluster: str
    positions: list[Position]
    # The restore's claim on each shard's part of the object store; None for a shard that was never flushed.
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
