"""Numbers that must not be mistaken for one another: offsets, positions, incarnations and times.

Each is a type of its own for mypy and a plain `int` when the program runs, so neither naming a type nor a call of it
costs anything to speak of. `NewType` would do the same but for arithmetic: there an offset and a size make an `int`,
which had to be wrapped anew for each append. Here the sum is an offset again; a difference of two is a plain number.
"""

from __future__ import annotations

from array import array
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator
    from typing import Generic, SupportsIndex, TypeVar, overload

    Number = TypeVar("Number", bound=int)

    class Offset(int):
        """A place in one stream: how many payload bytes are before it."""

        def __add__(self, size: int, /) -> Offset: ...

    class Position(int):
        """A place in the log of a shard."""

        def __add__(self, count: int, /) -> Position: ...

    class Incarnation(int):
        """One life of a stream: the number of the position at which it was created."""

    class Milliseconds(int):
        """A time since the Unix epoch, or a span of time."""

        def __add__(self, span: int, /) -> Milliseconds: ...

        def __sub__(self, span: int, /) -> Milliseconds: ...

    class Column(array[int], Generic[Number]):
        """An array of such numbers: what is taken out of it has their type."""

        @overload
        def __getitem__(self, index: SupportsIndex, /) -> Number: ...

        @overload
        def __getitem__(self, index: slice, /) -> Column[Number]: ...

        def __getitem__(self, index: SupportsIndex | slice, /) -> Number | Column[Number]: ...

        def __iter__(self) -> Iterator[Number]: ...

        def __mul__(self, count: int, /) -> Column[Number]: ...

else:
    Column = array
    Offset = Position = Incarnation = Milliseconds = int
