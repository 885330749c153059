"""The interactive page at /docs: every operation of /openapi.json, to read and to try with a token.

The page is three files of this package. It loads nothing from elsewhere, and its content security policy
allows scripts, styles and requests of this service only: no inline script or style, no frame, no form, and
with trusted types no text that becomes markup. The reader's token stays in its input field. The page is
public, as the document is. Only the token decides about access to data.
"""

from pathlib import Path

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

STATIC = Path(__file__).parent / "static"
_KINDS = {".html": "text/html", ".css": "text/css", ".js": "text/javascript"}
HEADERS = {
    "Content-Security-Policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; "
        "form-action 'none'; base-uri 'none'; frame-ancestors 'none'; require-trusted-types-for 'script'"
    ),
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cache-Control": "no-cache",
}


def docs_routes() -> list[Route]:
    """The page and its files."""
    return [_file_route("/docs", "docs.html")] + [
        _file_route(f"/docs/{name}", name) for name in ("docs.css", "docs.js")
    ]


def _file_route(path: str, name: str) -> Route:
    content = (STATIC / name).read_bytes()

    async def answer(_request: Request) -> Response:
        return Response(content, media_type=_KINDS[Path(name).suffix], headers=HEADERS)

    return Route(path, answer)
