"""The rules for the head of a request: what is refused before a handler is called. Pure functions over bytes."""

from __future__ import annotations

from typing import Final

from millstream.errors import InvalidRequest
from millstream.server.http.error_map import error_response, problem
from millstream.server.http.messages import Response, base_url_of

HEADERS_TOO_LARGE: Final = problem(431, "headers_too_large", "the request line and headers are too large")


class Refused(Exception):
    """Input that is not a valid request. Stops the parser; carries the answer, if one can still be sent."""

    def __init__(self, response: Response | None) -> None:
        self.response = response


def split_absolute(target: bytes) -> tuple[bytes | None, bytes]:
    """The authority, and path with query, of a target in absolute form (`http://host/path?query`); `*` is the
    server."""
    scheme, separator, rest = target.partition(b"://")
    if not separator or scheme.lower() not in (b"http", b"https"):
        return None, b"/"
    ends = [at for at in (rest.find(b"/"), rest.find(b"?")) if at >= 0]
    end = min(ends, default=len(rest))
    path = rest[end:]
    return rest[:end], path if path.startswith(b"/") else b"/" + path


def check_size(target: bytes, headers: dict[bytes, bytes], header_bytes_max: int) -> None:
    if sum(map(len, headers)) + sum(map(len, headers.values())) + len(target) > header_bytes_max:
        raise Refused(HEADERS_TOO_LARGE)


def check_version(version: str) -> None:
    if version not in ("1.0", "1.1"):
        raise Refused(problem(505, "version_not_supported", "this server speaks HTTP/1.1"))


def check_coding(version: str, coding: bytes) -> None:
    """Every intermediary must find the same end of the body (RFC 9112 §6.1)."""
    if version == "1.0":
        raise Refused(problem(400, "malformed_request", "HTTP/1.0 has no Transfer-Encoding"))
    *others, last = (name.strip().lower() for name in coding.split(b","))
    if last != b"chunked" or b"chunked" in others:
        raise Refused(problem(400, "malformed_request", "chunked must come last in Transfer-Encoding, and once"))
    if others:
        raise Refused(problem(501, "coding_not_supported", "the only Transfer-Encoding known is chunked"))


def check_upgrade(method: bytes, headers: dict[bytes, bytes]) -> None:
    """An upgrade is ignored (RFC 9110 §7.8). But the parser ends such a request at its headers, so a body could not be
    told from the next request."""
    if b"content-length" in headers or b"transfer-encoding" in headers or method == b"CONNECT":
        raise Refused(problem(501, "upgrade_not_supported", "this server speaks HTTP/1.1 only"))


def check_host(version: str, host: bytes | None) -> None:
    if host is not None:
        try:
            base_url_of("http", host)
        except InvalidRequest as error:
            raise Refused(error_response(error)) from None
    elif version == "1.1":
        raise Refused(problem(400, "missing_host", "an HTTP/1.1 request needs a Host header"))


def check_expectation(expectation: bytes) -> None:
    if expectation.lower() != b"100-continue":
        raise Refused(problem(417, "expectation_failed", "the only expectation known is 100-continue"))


def body_too_large(limit: int) -> Refused:
    return Refused(problem(413, "payload_too_large", f"the request body is larger than {limit} bytes"))
