"""The console's files: HTML, CSS and ES modules of the package, held in memory and served below /console/.

They hold no data, so they need no token; they get what they show from the public API, as any client would. The content
security policy of every file lets a page load nothing from elsewhere, run no inline script, and turn no text into HTML.
"""

from __future__ import annotations

import hashlib
from importlib.resources import files
from importlib.resources.abc import Traversable
from typing import Final, NamedTuple

from millstream.access.exposure import is_loopback_host
from millstream.config import Config
from millstream.errors import NotFound
from millstream.server.http.messages import Request, Response

ROOT: Final = b"/console/"

_TYPES: Final = {
    ".html": b"text/html; charset=utf-8",
    ".css": b"text/css; charset=utf-8",
    ".js": b"text/javascript; charset=utf-8",
    ".svg": b"image/svg+xml",
}
_POLICY: Final = (
    b"default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src 'self' blob:;"
    b" base-uri 'none'; form-action 'none'; frame-ancestors 'none';"
    b" require-trusted-types-for 'script'; trusted-types 'none'"
)
_PAGE_FIELDS: Final = (
    b"content-security-policy: %b\r\n"
    b"referrer-policy: no-referrer\r\n"
    b"cross-origin-opener-policy: same-origin\r\n"
    b"cache-control: no-cache\r\n" % _POLICY
)
# Relative, so that it also works where an ASGI application is mounted below a prefix.
_TO_CONSOLE: Final = Response(302, b"location: console/\r\ncache-control: no-store\r\nvary: accept\r\n")


class _File(NamedTuple):
    fields: bytes
    etag: bytes
    content: bytes


class Console:
    def __init__(self) -> None:
        self._files = {ROOT + file.name.encode(): _read(file) for file in _packaged()}
        self._files[ROOT] = self._files[ROOT + b"index.html"]

    def serve(self, request: Request) -> Response:
        """Answer a GET or HEAD of `/`, `/console` or anything below it."""
        request.is_open = True
        if request.path == b"/console" or (request.path == b"/" and _is_browser(request)):
            return _TO_CONSOLE
        file = self._files.get(request.path)
        if file is None:
            raise NotFound("there is nothing at this path", code="not_found", hint="the console is at /console/")
        if request.headers.get(b"if-none-match") == file.etag:
            return Response(304, file.fields)
        return Response(200, file.fields, file.content)


def open_console(config: Config, *, is_mounted: bool = False) -> Console | None:
    """The console if it is enabled; `auto` enables it for a standalone server that only this machine can reach."""
    wanted = config.console.enabled
    if wanted is None:
        wanted = not is_mounted and is_loopback_host(config.server.listen[0])
    return Console() if wanted else None


def _packaged() -> list[Traversable]:
    return [file for file in files("millstream").joinpath("console").iterdir() if _suffix(file) in _TYPES]


def _read(file: Traversable) -> _File:
    content = file.read_bytes()
    etag = b'"%b"' % hashlib.sha256(content).hexdigest()[:32].encode()
    fields = b"content-type: %b\r\netag: %b\r\n%b" % (_TYPES[_suffix(file)], etag, _PAGE_FIELDS)
    return _File(fields, etag, content)


def _suffix(file: Traversable) -> str:
    return "." + file.name.rpartition(".")[2]


def _is_browser(request: Request) -> bool:
    return b"text/html" in request.headers.get(b"accept", b"")
