"""The states of a connection: how far the client's next request has arrived, and how far its last one is answered.

The two advance independently: a pipelined request arrives while the one before it is being answered.

Reading (`RequestReader.state`):

    IDLE ──first byte──▶ HEAD ──empty line──▶ BODY ──last byte──▶ IDLE
                          │                    ▲
                          └───▶ EXPECTING ─────┘
                                            100 Continue is sent

    IDLE                   ──close──▶ ENDED
    HEAD, EXPECTING, BODY  ──close──▶ CUT_OFF

A request without a body passes through BODY all the same. EXPECTING is the BODY of a request whose client wants a
100 Continue and has not got it, because requests before it are not answered yet; the client need not wait, so the last
byte may come here too. `close` happens when the client has ended its side, when what it sent is refused, and when the
last answer is written. From then on, what arrives is thrown away.

Answering (`Connection.state`):

    READY ──────request is complete──────▶ HANDLING ──answer is bytes──▶ (answered)
      ▲                                     ▲    │                            ▲
      │                                     │    └──▶ STREAMING ──body ends───┘
      │                              next turn of the loop
      │                                     │
      │  (answered), a request waits ──▶ SCHEDULED ◀──client has read, a request waits── BLOCKED
      │                                                                                    ▲ │
      ├──(answered), none waits                   (answered), but the client does not read─┘ │
      └──client has read, none waits─────────────────────────────────────────────────────────┘

    (answered), and the connection is not to be kept  ──▶ CLOSING
    READY or BLOCKED, and a refusal is written        ──▶ CLOSING
    READY, and the client stops reading               ──▶ BLOCKED
    every state                     ──connection is lost──▶ CLOSED

`(answered)` is no state: it is left at once, in this order of precedence: CLOSING, BLOCKED, SCHEDULED, READY. While a
connection is not READY, complete requests wait in line. A refusal waits as well, until the line is empty.
"""

from __future__ import annotations

from enum import Enum, auto


class Reading(Enum):
    IDLE = auto()
    """Between requests."""
    HEAD = auto()
    """Within a request line or the headers."""
    EXPECTING = auto()
    """Within a body, or before it, and the client is owed a 100 Continue."""
    BODY = auto()
    """Within a body or its trailers."""
    ENDED = auto()
    """Closed between requests: all that came was a request."""
    CUT_OFF = auto()
    """Closed within a request: the client may still be sending the rest."""


class Answering(Enum):
    READY = auto()
    """No request is at work; the next begins when it is complete."""
    BLOCKED = auto()
    """No request is at work, and none begins before the client has read what was written."""
    SCHEDULED = auto()
    """The first request in line begins in the next turn of the loop."""
    HANDLING = auto()
    """The application has the request."""
    STREAMING = auto()
    """The head of the answer is written, the body is being produced."""
    CLOSING = auto()
    """The last answer is written."""
    CLOSED = auto()
    """The connection is gone."""
