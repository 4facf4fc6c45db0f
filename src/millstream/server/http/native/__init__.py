"""The native adapter: HTTP/1.1 on httptools and the event loop's own transports.

`listener`    accepts connections, tells them the time and stops them
`connection`  one client: takes its requests one after the other and answers them in order
`reading`     turns the client's bytes into requests; `heads` has the rules for a request's head
`writing`     turns answers into bytes
`states`      the states of a connection, and which follows which
`shared`      what all connections have in common: limits, the time, and totals that are limited

Requests of a connection are handled one after the other, pipelined ones included, because a later one may read what an
earlier one writes; and the next begins only when the client reads the answers to those before it. Every wait has a
limit, every buffer too: docs/behaviour.md lists them.
"""

from millstream.server.http.native.listener import NativeServer

__all__ = ["NativeServer"]
