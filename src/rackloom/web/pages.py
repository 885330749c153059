"""The pages: the map, what changes on it as it changes, one GPU, and the door.

Nothing is asked of anybody but this server: the policy below forbids it, and scripts and styles in the page.
"""

import asyncio
import secrets
from collections import OrderedDict
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from urllib.parse import parse_qs

from sse_starlette import EventSourceResponse, ServerSentEvent
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
from rackloom.web.details import said
from rackloom.web.door import Doorman, Viewer
from rackloom.web.headers import SafeHeaders
from rackloom.web.live import Live, Now
from rackloom.web.parts import Painter, Sheet
from rackloom.web.racks import find
from rackloom.web.reading import Source

STATIC = Path(__file__).parent / "static"
KEEP_ALIVE_SECONDS = 15
SEND_SECONDS = 20.0
FORM_BYTES = 8192
KINDS_KEPT = 32
"""Kinds of viewers (organisation and mode) whose drawings are kept; others are drawn anew."""

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
            Route("/map/gpu/{rack}/{tray:int}/{gpu:int}", pages.behind(pages.gpu, pages.stranger)),
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
        self._switch_trays = switch_trays
        self._painters: OrderedDict[tuple[str | None, Mode], Painter] = OrderedDict()
        self._painting = asyncio.Lock()
        self._boot = secrets.token_hex(8)
        """A position in the stream means nothing to another process, or after a restart."""

    def behind(self, page: Admitted, otherwise: Page) -> Page:
        """A page for those who are admitted."""

        async def answer(request: Request) -> Response:
            viewer = door.viewer(request, self._doorman)
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
        viewer = door.admitted(self._doorman, org, token)
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
        sheet = await self._sheet(viewer, mode, await self._live.fresh())
        position = f"{self._boot}.{sheet.number}"
        return HTMLResponse(render.page(viewer.org, mode, position, dict(sheet.all())))

    async def gpu(self, request: Request, viewer: Viewer) -> Response:
        """One GPU through all layers."""
        mode, path = _mode(request), request.path_params
        sheet = await self._sheet(viewer, mode, await self._live.fresh())
        seat = find(sheet.whole, (path["rack"], path["tray"], path["gpu"]))
        told = () if seat is None else said(sheet.whole, seat)
        return HTMLResponse(render.chain(seat, told), 404 if seat is None else 200)

    async def live(self, request: Request, viewer: Viewer) -> Response:
        """What changes on the page, as it changes, until the token ends."""
        position = request.headers.get("last-event-id") or request.query_params.get("after", "")
        return EventSourceResponse(
            self._changes(viewer, _mode(request), self._number(position)),
            ping=KEEP_ALIVE_SECONDS,
            send_timeout=SEND_SECONDS,
            sep="\n",
        )

    async def _changes(self, viewer: Viewer, mode: Mode, number: int) -> AsyncIterator[ServerSentEvent]:
        async with self._live.watched():
            while self._clock() < viewer.expires:
                now = await self._live.after(number)
                sheet = await self._sheet(viewer, mode, now)
                markup = render.changes(sheet.since(number))
                number = sheet.number
                yield ServerSentEvent(id=f"{self._boot}.{number}", data=markup, sep="\n")

    async def _sheet(self, viewer: Viewer, mode: Mode, now: Now) -> Sheet:
        kind = (None if viewer.operator else viewer.org, mode)
        async with self._painting:
            painter = self._painters.setdefault(kind, Painter(*kind, self._switch_trays))
            self._painters.move_to_end(kind)
            if len(self._painters) > KINDS_KEPT:
                self._painters.popitem(last=False)
            # Drawing a hundred racks takes a while, in which others want to be answered.
            return await asyncio.to_thread(painter.follow, now)

    def _number(self, position: str) -> int:
        boot, _, number = position.partition(".")
        return int(number) if boot == self._boot and number.isdecimal() else 0


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
