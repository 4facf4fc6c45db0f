"""millstream: durable, replayable streams over plain HTTP."""

__version__ = "0.1.0"
