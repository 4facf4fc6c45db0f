"""What makes Spark find `format("millstream")` by itself: a module `pyspark_*` with a `DefaultSource`."""

from millstream.spark.source import MillstreamSource as DefaultSource

__all__ = ["DefaultSource"]
