"""The HTTP side of the rack map: login, the page, one GPU, and the stream of changes.

Changes are sent as server-sent events. A bearer token in a cookie decides whether a viewer may look
(`viewers`). Forms are accepted only from a page of the same origin, as the browser states it (`forms`).
If the pages are given the REST application, tenants carve, order and release there (`action_pages`).

Every answer carries a content security policy that allows this server only, no inline scripts and no
frames. Pages are never stored in a cache, because the page of one tenant must not stay there for the next
one. Static files are revalidated.

A stream sends the parts that changed after its position. A position belongs to one start of the process, so
everything is sent after a restart. A viewer may hold 16 streams and all viewers together 256, a quarter
of the service's connections, because REST needs them too.
"""

import re
import secrets
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from urllib.parse import urlencode

from sse_starlette import EventSourceResponse, ServerSentEvent
from starlette.applications import Starlette
from starlette.datastructures import MutableHeaders
from starlette.middleware import Middleware
from starlette.middleware.gzip import GZipMiddleware
from starlette.requests import Request
from starlette.responses import HTMLResponse, PlainTextResponse, RedirectResponse, Response, StreamingResponse
from starlette.routing import Mount, Route
from starlette.staticfiles import StaticFiles
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from rackloom.core.diagnosis.runbooks import runbooks
from rackloom.errors import Retry, Unknown
from rackloom.topology.part_names import canonical_name
from rackloom.web import render
from rackloom.web.action_pages import ACTIONS, ActionPages
from rackloom.web.chain import layer_reports
from rackloom.web.changes import SiteChanges, changes_between
from rackloom.web.export import gpu_table
from rackloom.web.forms import is_same_origin, read_form
from rackloom.web.frames import ColourMode
from rackloom.web.highlight import HUE, MARK, FilterChoice, filter_style
from rackloom.web.history import PastTime
from rackloom.web.live import LiveMap
from rackloom.web.make_room import MOST_TRAYS, room_plan
from rackloom.web.model import SiteMap, rack_id
from rackloom.web.painters import PageSheet, Painters, ViewerKind
from rackloom.web.places import findings_at
from rackloom.web.provider_sign_in import BACK, ProviderSignIn, page_of_the_map
from rackloom.web.racks import GpuAddress, find_gpu
from rackloom.web.search import SearchIndexes, SearchResult
from rackloom.web.serial_thread import SerialThread
from rackloom.web.sign_in_codes import SignInCodes
from rackloom.web.trends import Trends
from rackloom.web.view import PageView, gpu_address, gpu_link, page_path, page_view, time_of_address
from rackloom.web.viewers import (
    Authenticator,
    Session,
    Viewer,
    end_session,
    keep_session,
    session_of,
    verify_session,
)

# Headers of every answer.


CONTENT_POLICY = "; ".join(
    [
        "default-src 'none'",
        "script-src 'self'",
        "style-src 'self'",
        "img-src 'self'",
        "connect-src 'self'",
        "form-action 'self'",
        "base-uri 'none'",
        "frame-ancestors 'none'",
    ]
)
SECURITY_HEADERS = {
    "Content-Security-Policy": CONTENT_POLICY,
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
}


class SecurityHeaders:
    """ASGI middleware."""

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Let a request pass, and put the headers on its answer."""

        async def sent(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                headers.update(SECURITY_HEADERS)
                # Pages of a tenant must not stay in a cache for the next one. Files are revalidated.
                headers.setdefault("Cache-Control", "no-cache" if "etag" in headers else "no-store")
            await send(message)

        await self.app(scope, receive, sent)


# Limits of open streams.


KEEP_ALIVE_SECONDS = 15
SEND_SECONDS = 20.0
MAX_OF_VIEWER = 16
MAX_STREAMS = 256
"""A quarter of the connections that the service accepts."""


class OpenStreams:
    """The number of open streams of each viewer, whichever tokens it has."""

    def __init__(self) -> None:
        self._open: Counter[tuple[str, str]] = Counter()

    def full(self, viewer: Viewer) -> bool:
        """Whether a viewer, or all viewers together, have reached the limit."""
        return self._open[viewer.name] >= MAX_OF_VIEWER or self._open.total() >= MAX_STREAMS

    @contextmanager
    def counted(self, viewer: Viewer) -> Iterator[None]:
        """Count one stream within the context."""
        self._open[viewer.name] += 1
        try:
            yield
        finally:
            self._open[viewer.name] -= 1
            self._open += Counter()


class ChangeStream(EventSourceResponse):
    """A response that is counted as an open stream until it ends."""

    def __init__(self, streams: OpenStreams, viewer: Viewer, changes: AsyncIterator[ServerSentEvent]) -> None:
        super().__init__(changes, ping=KEEP_ALIVE_SECONDS, send_timeout=SEND_SECONDS, sep="\n")
        self._streams = streams
        self._viewer = viewer

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the stream."""
        with self._streams.counted(self._viewer):
            await super().__call__(scope, receive, send)


# The pages.


STATIC = Path(__file__).parent / "static"
_READING_NUMBER = re.compile(r"[0-9]{1,18}")
"""The number of a reading. Limited, because Python refuses to convert more than 4300 digits."""

STYLE_SECONDS = 3600
"""How long a browser keeps the style sheet of a filter."""
_TRAY_COUNT = re.compile(r"[0-9]{1,5}")

DASHBOARDS = {name: f"rackloom-{name}" for name in ("site", "claims", "gangs", "transfers")}
"""The uid of each dashboard of deploy/monitoring."""

PageHandler = Callable[[Request], Awaitable[Response]]
ViewerPageHandler = Callable[[Request, Viewer], Awaitable[Response]]


def create_pages(
    live: LiveMap,
    authenticate: Authenticator,
    clock: Callable[[], float],
    *,
    switch_trays: int = 0,
    codes: SignInCodes | None = None,
    rest: ASGIApp | None = None,
    providers: ProviderSignIn | None = None,
    grafana: str | None = None,
) -> ASGIApp:
    """The ASGI application that answers `/` and `/map/`.

    `switch_trays` is the number of switch trays in a rack, if known. `clock` gives seconds since the epoch.
    `codes` are those of the sign-in links that this process offers. `rest` is the application of REST, by
    which tenants carve, order and release. Without it they only look. Browsers may sign in at `providers`.
    `grafana` is the address of the Grafana that has our dashboards. Operators get links to them.
    """
    actions = None if rest is None else ActionPages(rest, clock)
    pages = _MapPages(
        live,
        authenticate,
        clock,
        switch_trays,
        codes or SignInCodes(clock),
        acting=actions is not None,
        providers=providers,
        grafana=grafana,
    )
    compressed = [Middleware(GZipMiddleware)]
    # Pages that show a time of the history have that time before their name: see `view`.
    shown = [
        Route(below + path, pages.signed_in(page, pages.unauthorized), middleware=compressed)
        for below in ("/map", "/map/at/{at}")
        for path, page in (
            ("/gpus.csv", pages.table),
            ("/search", pages.search),
            ("/history", pages.history),
            ("/gpu/{rack}/{tray}/{gpu}", pages.gpu),
        )
    ]
    return Starlette(
        routes=[
            Route("/", pages.signed_in(pages.map, pages.to_login), middleware=compressed),
            Route("/map/at", pages.signed_in(pages.to_time, pages.to_login)),
            Route("/map/at/{at}", pages.signed_in(pages.map, pages.to_login), middleware=compressed),
            *shown,
            Route("/map/login", pages.login, methods=["GET", "POST"]),
            *([] if providers is None else _provider_routes(pages, providers)),
            Route("/map/logout", pages.logout, methods=["POST"]),
            Route("/map/live", pages.signed_in(pages.live, pages.unauthorized)),
            Route("/map/runbook/{name}", pages.signed_in(pages.runbook, pages.to_login)),
            *([] if actions is None else _action_routes(pages, actions)),
            Route("/map/only/{mark}.css", _filter_style),
            Mount("/map/static", StaticFiles(directory=STATIC)),
        ],
        middleware=[Middleware(SecurityHeaders)],
        exception_handlers={
            Retry: _unavailable,
            Unknown: _unavailable,
            _NoSuchTime: _no_such_time,
        },
    )


def _action_routes(pages: "_MapPages", actions: ActionPages) -> list[Route]:
    def route(path: str, page: ViewerPageHandler, method: str = "GET") -> Route:
        return Route(ACTIONS + path, pages.signed_in(page, pages.to_login), methods=[method])

    return [
        route("", actions.overview),
        route("/{action}", actions.plan),
        route("/{action}", actions.order, "POST"),
    ]


def _provider_routes(pages: "_MapPages", providers: ProviderSignIn) -> list[Route]:
    return [
        Route("/map/login/begin", providers.begin, methods=["POST"]),
        Route(BACK, pages.from_provider),
    ]


class _NoSuchTime(Exception):
    """An address names a time that the history does not have."""

    def __init__(self, oldest: float | None) -> None:
        super().__init__("the history of this site does not have that time")
        self.oldest = oldest
        """When the history begins, in seconds since the epoch, or None if nothing was read yet."""


async def _no_such_time(_request: Request, error: Exception) -> Response:
    assert isinstance(error, _NoSuchTime)  # noqa: S101 - narrows the type
    return HTMLResponse(render.render_no_such_time(error.oldest), 404)


async def _filter_style(request: Request) -> Response:
    """The style sheet of a filter. It reveals nothing about the site."""
    mark, hue = str(request.path_params["mark"]), request.query_params.get("hue", "")
    if not MARK.fullmatch(mark) or not (hue == "" or HUE.fullmatch(hue)):
        return PlainTextResponse("there is no such filter\n", 404)
    style = filter_style(mark, int(hue) if hue else None)
    headers = {"Cache-Control": f"max-age={STYLE_SECONDS}"}
    return Response(style, media_type="text/css", headers=headers)


async def _unavailable(_request: Request, error: Exception) -> Response:
    """The answer while it cannot be found out who may look."""
    assert isinstance(error, Retry | Unknown)  # noqa: S101 - narrows the type
    return PlainTextResponse(f"{error.reason}\n", 503)


class _MapPages:
    def __init__(
        self,
        live: LiveMap,
        authenticate: Authenticator,
        clock: Callable[[], float],
        switch_trays: int,
        codes: SignInCodes,
        *,
        acting: bool,
        providers: ProviderSignIn | None,
        grafana: str | None,
    ) -> None:
        self._acting = acting
        """Whether tenants have forms."""
        self._providers = providers
        self._grafana = grafana
        self._live = live
        self._codes = codes
        self._authenticate = authenticate
        self._clock = clock
        self._painters = Painters(switch_trays)
        self._streams = OpenStreams()
        self._searches = SearchIndexes()
        self._trends = Trends()
        self._comparing = SerialThread()
        self._boot = secrets.token_hex(8)
        """Part of stream positions, which are not valid for another process or after a restart."""

    def signed_in(self, page: ViewerPageHandler, otherwise: PageHandler) -> PageHandler:
        """A page for authenticated viewers. `otherwise` answers all other requests."""

        async def answer(request: Request) -> Response:
            viewer = await verify_session(self._authenticate, session_of(request))
            return await (otherwise(request) if viewer is None else page(request, viewer))

        return answer

    async def to_login(self, request: Request) -> Response:
        """The answer to a browser without a valid token: after signing in it has the page that it wanted."""
        query = f"?{request.url.query}" if request.url.query else ""
        target = page_of_the_map(request.url.path + query) if request.method == "GET" else "/"
        wanted = "" if target == "/" else f"?{urlencode({'to': target})}"
        return RedirectResponse(f"/map/login{wanted}", 303)

    async def unauthorized(self, request: Request) -> Response:
        """The answer to a script without a valid token."""
        return PlainTextResponse("sign in at /map/login\n", 401)

    async def login(self, request: Request) -> Response:
        """Verify a token and keep it in the cookie."""
        if request.method == "GET":
            code = request.query_params.get("code")
            if code is not None:
                return await self._by_code(code, request.url.scheme)
            return self._login_page("", 200, page_of_the_map(request.query_params.get("to", "/")))
        if not is_same_origin(request):
            return self._login_page("The form was sent from another site.", 403)
        form = dict(await read_form(request) or ())
        target = page_of_the_map(form.get("to", "/"))
        session = Session(form.get("org", "").strip(), form.get("token", "").strip())
        viewer = await verify_session(self._authenticate, session)
        if viewer is None:
            problem = "That token does not admit to this organisation, or it has expired."
            return self._login_page(problem, 401, target)
        return self._with_cookie(RedirectResponse(target, 303), session, viewer, request.url.scheme)

    def _login_page(self, problem: str, status: int, target: str = "/") -> Response:
        providers = () if self._providers is None else self._providers.providers
        return HTMLResponse(render.render_login(problem, providers, target), status)

    async def from_provider(self, request: Request) -> Response:
        """Sign in a browser that an identity provider has sent back."""
        assert self._providers is not None  # noqa: S101 - else there is no route
        finished = await self._providers.finish(request)
        if isinstance(finished, Response):
            return finished
        session, viewer, target = finished
        answer = self._leading_on(session, target)
        return self._providers.forget(self._with_cookie(answer, session, viewer, request.url.scheme))

    async def _by_code(self, code: str, scheme: str) -> Response:
        """Sign in by a link. A page leads on: a redirect from elsewhere would carry no strict cookie."""
        session = Session(*(self._codes.find(code) or ("", "")))
        viewer = await verify_session(self._authenticate, session)
        if viewer is None:
            problem = (
                "This link is no longer valid. Sign in with a token, or start the site again for a new link."
            )
            return self._login_page(problem, 401)
        return self._with_cookie(self._leading_on(session), session, viewer, scheme)

    def _leading_on(self, session: Session, target: str = "/") -> Response:
        text = f"Signed in as {session.org}. Go to the rack map"
        return HTMLResponse(render.render_leading_on(target, text))

    def _with_cookie(self, answer: Response, session: Session, viewer: Viewer, scheme: str) -> Response:
        return keep_session(answer, session, viewer.expires - self._clock(), scheme)

    async def logout(self, request: Request) -> Response:
        """Delete the cookie."""
        if not is_same_origin(request):
            return PlainTextResponse("the form was sent from another site\n", 403)
        return end_session(RedirectResponse("/map/login", 303))

    async def map(self, request: Request, viewer: Viewer) -> Response:
        """The page, as of now or of a time of the history."""
        view, sheet, past = await self._seen(request, viewer)
        asked = request.query_params.get("gpu", "")
        if asked and gpu_address(asked) is None:
            org, _ = _viewer_kind(viewer, view.mode)
            if named := await self._searches.search(org, sheet.whole, asked):
                return _lead_to_named(asked, named, view.mode)
        position = f"{self._boot}.{sheet.number}"
        changes = None if past is None else await self._changes_since(sheet.whole, viewer, view)
        chain = render.render_no_choice() if not view.gpu else _chain(sheet, gpu_address(view.gpu))[0]
        racks = {rack_id(rack.name): rack.name for rack in sheet.whole.racks}
        view = view.with_rack_of_gpu(racks)
        found = await self._found(request, viewer, view, sheet)
        # The choice that stays in colour, or None if everything does.
        unknown = FilterChoice(view.only, "what is not on the map now")
        # The address names a number of trays, and the map shows a place for a job of that size.
        asked = request.query_params.get("trays", "")
        trays = int(asked) if _TRAY_COUNT.fullmatch(asked) else 0
        return HTMLResponse(
            render.render_page(
                viewer.org,
                view,
                position,
                dict(sheet.all()),
                chain,
                racks.values(),
                found,
                past=past,
                changes=changes,
                operator=viewer.operator,
                room=room_plan(sheet.whole, trays) if 0 < trays <= MOST_TRAYS else None,
                only=sheet.choices.get(view.only, unknown) if view.only else None,
                acting=self._acting and past is None and not viewer.operator,
                dashboards=self._dashboards(viewer, past),
            )
        )

    def _dashboards(self, viewer: Viewer, past: PastTime | None) -> Mapping[str, str]:
        """Name and address of each dashboard in Grafana. Empty for tenants: none shows a tenant alone."""
        if self._grafana is None or not viewer.operator:
            return {}
        hours = ("now-6h", "now") if past is None else _hour_around(past.asked)
        query = urlencode({"from": hours[0], "to": hours[1]})
        base = self._grafana.rstrip("/")
        return {name: f"{base}/d/{uid}?{query}" for name, uid in DASHBOARDS.items()}

    async def _changes_since(self, then: SiteMap, viewer: Viewer, view: PageView) -> SiteChanges:
        """The changes to the viewer's part of the site since the map `then`."""
        present = await self._painters.sheet(
            _viewer_kind(viewer, view.mode), await self._live.fresh(), view.opened
        )
        return await self._comparing.run(changes_between, then, present.whole)

    async def to_time(self, request: Request, _viewer: Viewer) -> Response:
        """Lead a form that names a time to its page."""
        at = time_of_address(request.query_params.get("time", ""))
        if at is None:
            return RedirectResponse("/", 303)
        query = (await self._view(request)).query()
        now = (await self._live.fresh()).whole.at
        return RedirectResponse(page_path(None if at >= now else at) + query, 303)

    async def history(self, request: Request, viewer: Viewer) -> Response:
        """The charts of the last day, and the slider."""
        await self._live.fresh()
        maps = self._live.history.maps
        org, _ = _viewer_kind(viewer, ColourMode.USE)
        points = await self._trends.follow(org, maps)
        keeper = self._live.keeper
        return HTMLResponse(
            render.render_history(
                points,
                operator=viewer.operator,
                past=self._past(request),
                gaps=self._live.history.gaps,
                is_kept=keeper is not None,
                unkept_since=None if keeper is None else keeper.unkept_since,
            )
        )

    async def runbook(self, request: Request, _viewer: Viewer) -> Response:
        """The runbook for the findings of one check. It reveals nothing about the site."""
        found = runbooks().get(request.path_params["name"])
        return HTMLResponse(render.render_runbook(found), 404 if found is None else 200)

    async def table(self, request: Request, viewer: Viewer) -> Response:
        """The GPUs of the opened racks, or of all, as CSV."""
        view, sheet, _ = await self._seen(request, viewer)
        # The lines are made in a thread, a rack at a time.
        return StreamingResponse(
            gpu_table(sheet.whole, view.opened),
            media_type="text/csv; charset=utf-8",
            headers={"Content-Disposition": 'attachment; filename="rackloom-gpus.csv"'},
        )

    async def search(self, request: Request, viewer: Viewer) -> Response:
        """The objects that the viewer finds by a part of a name."""
        view, sheet, _ = await self._seen(request, viewer)
        return HTMLResponse(await self._found(request, viewer, view, sheet))

    async def _found(self, request: Request, viewer: Viewer, view: PageView, sheet: PageSheet) -> str:
        query = request.query_params.get("find", "")
        org, _ = _viewer_kind(viewer, view.mode)
        return render.render_found(view.mode, query, await self._searches.search(org, sheet.whole, query))

    async def gpu(self, request: Request, viewer: Viewer) -> Response:
        """One GPU through all layers."""
        # The GPU that a path names, or None if the path is malformed.
        address = gpu_address("-".join(str(request.path_params[name]) for name in ("rack", "tray", "gpu")))
        _, sheet, _ = await self._seen(request, viewer)
        markup, found = _chain(sheet, address)
        return HTMLResponse(markup, 200 if found else 404)

    async def _seen(self, request: Request, viewer: Viewer) -> tuple[PageView, PageSheet, PastTime | None]:
        """The view of an address, its sheet for this viewer, and the past time that it shows (or None)."""
        view, now = await self._view(request), await self._live.fresh()
        kind, past = _viewer_kind(viewer, view.mode), self._past(request)
        if past is None:
            return view, await self._painters.sheet(kind, now, view.opened), None
        return view, await self._painters.past_sheet(kind, past.whole, view.opened), past

    def _past(self, request: Request) -> PastTime | None:
        """The time of the history that a path names, or None for the present. Raises _NoSuchTime."""
        if "at" not in request.path_params:
            return None
        at = time_of_address(request.path_params["at"])
        # The times of readings have fractions of a second, those of addresses do not.
        whole = None if at is None else self._live.history.find(at + 1)
        if at is None or whole is None:
            raise _NoSuchTime(self._live.history.oldest)
        gap = next((gap for gap in self._live.history.gaps if gap[0] == whole.at), None)
        return PastTime(asked=at, whole=whole, gap=gap if gap is not None and at > whole.at + 1 else None)

    async def _view(self, request: Request) -> PageView:
        asked = request.query_params
        # Only the usual colours depend on how large the site is.
        racks = 0 if "by" in asked else len((await self._live.fresh()).whole.racks)
        return page_view(asked, racks)

    async def live(self, request: Request, viewer: Viewer) -> Response:
        """The stream of changes to the page, until the token expires."""
        if self._streams.full(viewer):
            return PlainTextResponse("too many maps are open: close one\n", 429)
        position = request.headers.get("last-event-id") or request.query_params.get("after", "")
        changes = self._changes(viewer, await self._view(request), self._number(position))
        return ChangeStream(self._streams, viewer, changes)

    async def _changes(self, viewer: Viewer, view: PageView, number: int) -> AsyncIterator[ServerSentEvent]:
        kind = _viewer_kind(viewer, view.mode)
        with self._painters.held(kind):
            async with self._live.watched():
                while self._clock() < viewer.expires:
                    now = await self._live.after(number)
                    sheet = await self._painters.sheet(kind, now, view.opened)
                    markup = render.render_changes(sheet.since(number))
                    number = sheet.number
                    yield ServerSentEvent(id=f"{self._boot}.{number}", data=markup, sep="\n")

    def _number(self, position: str) -> int:
        boot, _, number = position.partition(".")
        return int(number) if boot == self._boot and _READING_NUMBER.fullmatch(number) else 0


def _hour_around(at: float) -> tuple[str, str]:
    """Half an hour before and after a time, as Grafana takes it: milliseconds since the epoch."""
    return str(int((at - 1800) * 1000)), str(int((at + 1800) * 1000))


def _viewer_kind(viewer: Viewer, mode: ColourMode) -> ViewerKind:
    return None if viewer.operator else viewer.org, mode


def _lead_to_named(asked: str, found: Sequence[SearchResult], mode: ColourMode) -> Response:
    """Lead to the one GPU or tray that has this name, in any form, or to the search for it."""
    name = canonical_name(asked).casefold()
    named = (result for result in found if name in (result.name.casefold(), result.part.casefold()))
    ids = {result.gpu for result in named if result.gpu}
    return RedirectResponse(gpu_link(mode, *ids) if len(ids) == 1 else f"?{urlencode({'find': asked})}", 303)


def _chain(sheet: PageSheet, address: GpuAddress | None) -> tuple[str, bool]:
    """One GPU through all layers, and whether there is a GPU."""
    gpu = None if address is None else find_gpu(sheet.whole, address)
    if gpu is None or address is None:
        return render.render_chain(None, ()), False
    findings = findings_at(sheet.whole.findings or (), sheet.places, address)
    return render.render_chain(gpu, layer_reports(sheet.whole, gpu), findings), True
