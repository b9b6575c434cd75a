"""The page that shows all replicas side by side: each by its own visualizer, in a frame, and what was routed to it.

/visualizer/                      this page: the files of `overview/`, and behind them those of the visualizer
/replicas/NAME/visualizer/        a frame: the page of that replica, whose events come from /replicas/NAME/events
"""

import mimetypes
from pathlib import Path

from starlette.responses import FileResponse, RedirectResponse, Response

from ..server.errors import error_response
from ..server.visualizer import HEADERS, WEB

OVERVIEW = Path(__file__).parent / "overview"
FILES = {path.name: path for folder in (WEB, OVERVIEW) for path in folder.iterdir() if path.is_file()}
FRAMED = HEADERS | {"Content-Security-Policy": HEADERS["Content-Security-Policy"] + "; frame-src 'self'"}


def overview(path: str, query: str) -> Response:
    """The page's file at this path, as it stands behind `/visualizer`, with what stands behind its question mark."""
    if not path:
        return RedirectResponse("visualizer/" + (f"?{query}" if query else ""))
    file = FILES.get(path.removeprefix("/") or "index.html")
    if file is None:
        return error_response(404, "The visualizer has no such file.")
    return FileResponse(file, headers=FRAMED, media_type=mimetypes.guess_type(file.name)[0])
