"""The native adapter: HTTP/1.1 on httptools and the event loop's own transports.

`listener`    accepts connections, ticks their clock and stops them
`connection`  one client: handles its requests one after the other and answers them in order
`reading`     turns the client's bytes into requests; `heads` has the rules for a request's head
`writing`     turns answers into bytes
`states`      the states of a connection and their transitions
`shared`      what all connections share: limits, the current time, and limited totals

The requests of a connection, pipelined ones included, are handled one after the other, because a later one may read
what an earlier one writes. The next request begins only when the client has read the answers to those before it. Every
wait and every buffer has a limit: docs/behaviour.md lists them.
"""

from millstream.server.http.native.listener import NativeServer

__all__ = ["NativeServer"]
