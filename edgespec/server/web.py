"""The page at ``/``: static files, read once, sent with headers that let them load nothing from anywhere else.

The page is a client as any other: it asks this server's API, with a key where there is one.
"""

from __future__ import annotations

import hashlib
from functools import partial
from pathlib import Path

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

FOLDER = Path(__file__).with_name("page")
KINDS = {
    ".html": "text/html; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".mjs": "text/javascript; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".svg": "image/svg+xml",
}
POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src 'self'; media-src data:; "
    "frame-ancestors 'none'; base-uri 'none'; form-action 'none'; "
    "require-trusted-types-for 'script'; trusted-types 'none'"
)
HEADERS = {
    "Content-Security-Policy": POLICY,
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Permissions-Policy": "camera=(), geolocation=(), microphone=()",
    "Cache-Control": "no-cache",  # kept, and asked about each time: another version of edgespec has other files
}


def page_routes() -> list[Route]:
    """Make the routes of the page: ``/``, and its other files below ``/page/``."""
    routes = []
    for path in sorted(FOLDER.rglob("*")):
        if path.suffix in KINDS:
            name = path.relative_to(FOLDER).as_posix()
            where = "/" if name == "index.html" else f"/page/{name}"
            routes.append(Route(where, partial(_send, path.read_bytes(), KINDS[path.suffix])))
    return routes


async def _send(content: bytes, kind: str, request: Request) -> Response:
    tag = f'"{hashlib.sha256(content).hexdigest()[:32]}"'
    headers = HEADERS | {"ETag": tag}
    known = [one.strip().removeprefix("W/") for one in request.headers.get("if-none-match", "").split(",")]
    if tag in known or "*" in known:
        return Response(status_code=304, headers=headers)
    return Response(content, headers=headers, media_type=kind)
