"""The server, in three rooms: `http` (adapters, messages, limits), `api` (what requests mean), `node` (the process).

Handlers are sans-IO: they take a `Request` and call `reply` with a `Response`, at once or later. Adapters parse,
order, frame and limit; they know nothing of streams.
"""
