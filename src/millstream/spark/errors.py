"""What the data source says when it cannot go on. Spark shows an exception's text and nothing else of it."""

from __future__ import annotations

from millstream.errors import MillstreamError


class SourceError(MillstreamError):
    """Its text is the sentence that names the thing and its value, and then the remedy."""

    code = "spark_source"

    def __str__(self) -> str:
        if not self.hint:
            return f"{self.message}."
        return f"{self.message}. {self.hint[0].upper()}{self.hint[1:]}" + ("" if self.hint.endswith("?") else ".")


class SegmentMissing(SourceError):
    """A segment that is not where the cold tier is: reclaimed since the read was planned, or the wrong place."""
