"""The server, in three rooms: `http` (adapters, messages, limits), `api` (what requests mean), `node` (the process).

Handlers do no I/O: they take a `Request` and return a `Response`, or a `Pending` one. Adapters parse, order, frame and
limit; they know nothing of streams.
"""
