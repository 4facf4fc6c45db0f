"""Spark: the data source `format("millstream")` and the session it runs in.

Imports the protocol's rules and the tiers' file formats, never the server: Spark talks to it over HTTP like anyone.
"""

from millstream.spark.freshness import refresh

__all__ = ["refresh"]
