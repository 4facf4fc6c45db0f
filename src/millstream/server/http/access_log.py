"""The access log: a line for each answer, if the configuration asks for it."""

from __future__ import annotations

import logging

from millstream.server.http.messages import Request, Response

logger = logging.getLogger("millstream.access_log")


def log_access(request: Request, response: Response, seconds: float) -> None:
    """Log one line for an answer. The path is logged, the query is not, because it may hold anything."""
    logger.info(
        "%s %s %d",
        request.method,
        request.path.decode("latin-1"),
        response.status,
        extra={
            "request_id": request.id,
            "status": response.status,
            "milliseconds": round(seconds * 1000, 3),
            "bytes": len(response.body) if isinstance(response.body, bytes) else -1,
            "principal": request.principal.name if request.principal is not None else "",
            "address": request.address,
        },
    )
