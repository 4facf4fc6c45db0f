"""Folds: what a stream's messages amount to. Each takes the state so far and more messages, and returns the new state.

A user's own is named `module:function` and has the same form; it may be given a stream's messages in several calls.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Final, NamedTuple

import msgspec

from millstream.errors import ConfigurationError, InvalidRequest
from millstream.protocol.content_types import JSON, OCTET_STREAM
from millstream.protocol.lib0 import split_frames

Fold = Callable[[bytes | None, Sequence[bytes]], bytes]

YJS: Final = "yjs"
BUILT_IN: Final = ("merge-patch", "last-by-key", YJS)
_DECODE: Final = msgspec.json.Decoder().decode


class Folding(NamedTuple):
    fold: Fold
    content_type: str


def merge_patch(state: bytes | None, messages: Sequence[bytes]) -> bytes:
    """Each message is a JSON merge patch (RFC 7396) to the state, which starts as null."""
    value: Any = _DECODE(state) if state is not None else None
    for message in messages:
        value = _patched(value, _DECODE(message))
    return msgspec.json.encode(value)


def _patched(target: Any, patch: Any) -> Any:
    if not isinstance(patch, dict):
        return patch
    result = dict(target) if isinstance(target, dict) else {}
    for name, value in patch.items():
        if value is None:
            result.pop(name, None)
        else:
            result[name] = _patched(result.get(name), value)
    return result


def last_by_key(state: bytes | None, messages: Sequence[bytes], *, key: str) -> bytes:
    """An object that holds, by the value of a field, the last message that had it.

    A message whose only other fields are null, or `"deleted": true`, removes its key.
    """
    values: dict[str, Any] = _DECODE(state) if state is not None else {}
    for message in messages:
        value = _DECODE(message)
        if not isinstance(value, dict) or value.get(key) is None:
            raise InvalidRequest(f"a message has no field {key!r}: {message[:80]!r}", hint="name the key with --key")
        found = value[key]
        name = found if isinstance(found, str) else msgspec.json.encode(found).decode()
        others = [one for field, one in value.items() if field != key]
        if value.get("deleted") is True or (others and all(one is None for one in others)):
            values.pop(name, None)
        else:
            values[name] = value
    return msgspec.json.encode(values)


def yjs(state: bytes | None, messages: Sequence[bytes]) -> bytes:
    """Messages are lib0-framed Yjs updates; the state is one update that stands for them all."""
    try:
        from pycrdt import Doc
    except ImportError:
        raise ConfigurationError("folding Yjs documents needs pycrdt", hint="pip install 'millstream[yjs]'") from None
    document: Any = Doc()
    if state is not None:
        document.apply_update(state)
    for message in messages:
        for update in split_frames(message):
            document.apply_update(update)
    result: bytes = document.get_update()
    return result


def ship_module(name: str) -> None:
    """Let a user's module travel to the executors, which need not have it."""
    module = sys.modules.get(name.partition(":")[0])
    if name not in BUILT_IN and module is not None:
        from pyspark import cloudpickle

        register: Callable[[object], None] = cloudpickle.register_pickle_by_value
        register(module)


def find(name: str, key: str | None, content_type: str | None) -> Folding:
    """A fold by its name, or by `module:function`."""
    if name == "merge-patch":
        return Folding(merge_patch, content_type or JSON)
    if name == "last-by-key":
        if not key:
            raise InvalidRequest("last-by-key needs to know the key", hint="name the field with --key")
        return Folding(partial(last_by_key, key=key), content_type or JSON)
    if name == YJS:
        return Folding(yjs, content_type or OCTET_STREAM)
    module, separator, function = name.partition(":")
    if not separator:
        raise InvalidRequest(
            f"there is no fold {name!r}", hint=f"there are {', '.join(BUILT_IN)}, and your own as module:function"
        )
    if "" not in sys.path and str(Path.cwd()) not in sys.path:
        sys.path.append(str(Path.cwd()))  # a module beside where the job is started
    try:
        found = getattr(importlib.import_module(module), function)
    except (ImportError, AttributeError) as error:
        raise InvalidRequest(
            f"the fold {name!r} cannot be loaded: {error}",
            hint="run the job where the module is, or put it on PYTHONPATH",
        ) from None
    return Folding(found, content_type or str(getattr(found, "content_type", OCTET_STREAM)))
