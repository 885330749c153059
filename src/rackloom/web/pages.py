"""The pages: the map, what changes on it as it changes, one GPU, and the door.

Nothing is asked of anybody but this server: the policy below forbids it, and scripts and styles in the page.
"""

import re
import secrets
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from urllib.parse import parse_qs

from sse_starlette import ServerSentEvent
from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.middleware.gzip import GZipMiddleware
from starlette.requests import Request
from starlette.responses import HTMLResponse, PlainTextResponse, RedirectResponse, Response
from starlette.routing import Mount, Route
from starlette.staticfiles import StaticFiles
from starlette.types import ASGIApp

from rackloom.web import door, render
from rackloom.web.colouring import Mode
from rackloom.web.details import objections, said
from rackloom.web.door import Doorman, Viewer
from rackloom.web.headers import SafeHeaders
from rackloom.web.live import Live
from rackloom.web.painters import Kind, Painters
from rackloom.web.racks import Spot, find
from rackloom.web.reading import Source
from rackloom.web.streams import Stream, Streams

STATIC = Path(__file__).parent / "static"
FORM_BYTES = 8192
_INDEX = re.compile(r"[0-9]{1,4}")
_NUMBER = re.compile(r"[0-9]{1,18}")
"""Of a reading. Python converts no number of more than 4300 digits."""

Page = Callable[[Request], Awaitable[Response]]
Admitted = Callable[[Request, Viewer], Awaitable[Response]]


def create_pages(
    source: Source, doorman: Doorman, clock: Callable[[], float], *, switch_trays: int = 0
) -> ASGIApp:
    """The ASGI application that answers `/` and `/map/`.

    `switch_trays` are in one rack, as far as that is known; `clock` gives seconds since the epoch.
    """
    pages = _Pages(source, doorman, clock, switch_trays)
    return Starlette(
        routes=[
            Route("/", pages.behind(pages.map, pages.to_door), middleware=[Middleware(GZipMiddleware)]),
            Route("/map/login", pages.login, methods=["GET", "POST"]),
            Route("/map/logout", pages.logout, methods=["POST"]),
            Route("/map/live", pages.behind(pages.live, pages.stranger)),
            Route("/map/gpu/{rack}/{tray}/{gpu}", pages.behind(pages.gpu, pages.stranger)),
            Mount("/map/static", StaticFiles(directory=STATIC)),
        ],
        middleware=[Middleware(SafeHeaders)],
    )


class _Pages:
    def __init__(
        self, source: Source, doorman: Doorman, clock: Callable[[], float], switch_trays: int
    ) -> None:
        self._live = Live(source, clock)
        self._doorman = doorman
        self._clock = clock
        self._painters = Painters(switch_trays)
        self._streams = Streams()
        self._boot = secrets.token_hex(8)
        """A position in the stream means nothing to another process, or after a restart."""

    def behind(self, page: Admitted, otherwise: Page) -> Page:
        """A page for those who are admitted."""

        async def answer(request: Request) -> Response:
            viewer = await door.viewer(request, self._doorman)
            return await (otherwise(request) if viewer is None else page(request, viewer))

        return answer

    async def to_door(self, request: Request) -> Response:
        """Where people without a token go."""
        return RedirectResponse("/map/login", 303)

    async def stranger(self, request: Request) -> Response:
        """What their scripts are told."""
        return PlainTextResponse("sign in at /map/login\n", 401)

    async def login(self, request: Request) -> Response:
        """Take a token."""
        if request.method == "GET":
            return HTMLResponse(render.login(""))
        if not door.from_our_page(request):
            return HTMLResponse(render.login("The form was sent from another site."), 403)
        form = await _form(request)
        org, token = form.get("org", "").strip(), form.get("token", "").strip()
        viewer = await door.admitted(self._doorman, org, token)
        if viewer is None:
            words = "That token does not admit to this organisation, or it has expired."
            return HTMLResponse(render.login(words), 401)
        answer = RedirectResponse("/", 303)
        door.remember(answer, request, org, token, viewer.expires - self._clock())
        return answer

    async def logout(self, request: Request) -> Response:
        """Drop the token."""
        if not door.from_our_page(request):
            return PlainTextResponse("the form was sent from another site\n", 403)
        answer = RedirectResponse("/map/login", 303)
        door.forget(answer)
        return answer

    async def map(self, request: Request, viewer: Viewer) -> Response:
        """The page."""
        mode = _mode(request)
        sheet = await self._painters.sheet(_kind(viewer, mode), await self._live.fresh())
        position = f"{self._boot}.{sheet.number}"
        return HTMLResponse(render.page(viewer.org, mode, position, dict(sheet.all())))

    async def gpu(self, request: Request, viewer: Viewer) -> Response:
        """One GPU through all layers."""
        spot = _spot(request)
        if spot is None:
            return HTMLResponse(render.chain(None, ()), 404)
        kind = _kind(viewer, _mode(request))
        sheet = await self._painters.sheet(kind, await self._live.fresh())
        seat = find(sheet.whole, spot)
        if seat is None:
            return HTMLResponse(render.chain(None, ()), 404)
        told, found = said(sheet.whole, seat), objections(sheet.whole, seat)
        return HTMLResponse(render.chain(seat, told, found))

    async def live(self, request: Request, viewer: Viewer) -> Response:
        """What changes on the page, as it changes, until the token ends."""
        if self._streams.full(viewer):
            return PlainTextResponse("too many maps are open: close one\n", 429)
        position = request.headers.get("last-event-id") or request.query_params.get("after", "")
        changes = self._changes(viewer, _kind(viewer, _mode(request)), self._number(position))
        return Stream(self._streams, viewer, changes)

    async def _changes(self, viewer: Viewer, kind: Kind, number: int) -> AsyncIterator[ServerSentEvent]:
        with self._painters.held(kind):
            async with self._live.watched():
                while self._clock() < viewer.expires:
                    now = await self._live.after(number)
                    sheet = await self._painters.sheet(kind, now)
                    markup = render.changes(sheet.since(number))
                    number = sheet.number
                    yield ServerSentEvent(id=f"{self._boot}.{number}", data=markup, sep="\n")

    def _number(self, position: str) -> int:
        boot, _, number = position.partition(".")
        return int(number) if boot == self._boot and _NUMBER.fullmatch(number) else 0


def _kind(viewer: Viewer, mode: Mode) -> Kind:
    return None if viewer.operator else viewer.org, mode


def _spot(request: Request) -> Spot | None:
    """The seat that a path names; None: it names none that could be."""
    rack, tray, gpu = (str(request.path_params[name]) for name in ("rack", "tray", "gpu"))
    return (rack, int(tray), int(gpu)) if _INDEX.fullmatch(tray) and _INDEX.fullmatch(gpu) else None


def _mode(request: Request) -> Mode:
    wanted = request.query_params.get("by")
    return Mode(wanted) if wanted in set(Mode) else Mode.PARTITION


async def _form(request: Request) -> dict[str, str]:
    body = b""
    async for chunk in request.stream():
        body += chunk
        if len(body) > FORM_BYTES:
            return {}
    return {name: values[0] for name, values in parse_qs(body.decode("ascii", "replace")).items()}
