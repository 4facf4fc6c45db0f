"""The built pages of the examples, for `millstream serve --examples`: held in memory and served below /examples/."""

from __future__ import annotations

import mimetypes
from pathlib import Path
from typing import Final, NamedTuple

from millstream.errors import ConfigurationError, NotFound
from millstream.server.http.messages import Request, Response

EXAMPLES_ROOT: Final = b"/examples/"
FILES_BYTES_MAX: Final = 64 << 20


class Page(NamedTuple):
    content_type: str
    content: bytes


class Examples:
    def __init__(self, folder: Path) -> None:
        """Read the built files in `folder`: the `dist` directory of each example."""
        self._pages: dict[bytes, Page] = {}
        size = 0
        for dist in sorted(folder.glob("*/dist")):
            for file in sorted(path for path in dist.rglob("*") if path.is_file()):
                page = Page(mimetypes.guess_type(file.name)[0] or "application/octet-stream", file.read_bytes())
                size += len(page.content)
                name = file.relative_to(dist).as_posix()
                self._pages[EXAMPLES_ROOT + f"{dist.parent.name}/{name}".encode()] = page
        if not self._pages:
            raise ConfigurationError(
                f"there are no built examples in {folder}", hint="build them with `make examples`, or name their folder"
            )
        if size > FILES_BYTES_MAX:
            raise ConfigurationError(f"the examples in {folder} take {size} bytes; {FILES_BYTES_MAX} are allowed")

    @property
    def paths(self) -> list[str]:
        """The start page of each example."""
        return [path.decode().removesuffix("index.html") for path in self._pages if path.endswith(b"/index.html")]

    def serve(self, request: Request) -> Response:
        path = request.path + b"index.html" if request.path.endswith(b"/") else request.path
        page = self._pages.get(path)
        if page is None or request.method not in ("GET", "HEAD"):
            raise NotFound("there is no such example", code="not_found", hint=f"there are {', '.join(self.paths)}")
        fields = b"content-type: %b\r\ncache-control: no-cache\r\n" % page.content_type.encode()
        request.is_open = True
        return Response(200, fields, page.content)
