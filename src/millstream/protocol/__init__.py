"""The rules of the wire: pure functions over bytes and small values.

Nothing here reads a clock, a file or a socket, and nothing here knows what a stream is kept in.
Sections cited as §n are those of the Durable Streams Protocol; "Extensions §n" those of its extensions.
"""
