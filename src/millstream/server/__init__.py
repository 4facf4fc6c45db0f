"""HTTP: the handlers, and the two adapters that carry them.

Handlers are sans-IO: they take a `Request` and call `reply` with a `Response`, at once or later. Adapters parse,
order, frame and limit; they know nothing of streams.
"""
