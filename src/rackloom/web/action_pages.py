"""The pages on which a tenant carves, orders and releases: forms, the plan of a form, and its outcome.

`/map/actions` has the three forms and the objects of the tenant. A form leads to its plan, a GET that changes
nothing. The form below the plan carries it out, a POST to the same path. The answer to that is a redirect to
`/map/actions`, so that a reload sends nothing again.

A POST is accepted from a page of this origin with a ticket of the same session (`forms`), at most
`FORM_BYTES` long, with the fields of the action and no others, and carried out once (`done_once`). The action
is planned again first. If the plan differs from the one that the tenant has read, the page shows the new plan
and the reason, and does nothing.

All requests go to REST in this process, with the token of the viewer's session and from the viewer's
address: authorization, quotas, limits of requests and the audit log are those of REST.
"""

from collections.abc import Awaitable, Callable

import httpx2
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import HTMLResponse, RedirectResponse, Response
from starlette.types import ASGIApp, Receive, Scope, Send

from rackloom.client import AsyncClient, Connection, RetryPolicy
from rackloom.errors import Misuse, Refused, Retry, Unknown
from rackloom.web.done_once import OrdersDone, Outcome
from rackloom.web.forms import (
    FORM_BYTES,
    TICKET_SECONDS,
    Fields,
    Ticket,
    is_same_origin,
    new_ticket,
    read_form,
    ticket_problem,
)
from rackloom.web.render import render_template
from rackloom.web.tenant_actions import (
    MOST_RELEASED,
    Action,
    ActionPlan,
    Asked,
    asked_for,
    carried_out,
    planned,
)
from rackloom.web.tenant_objects import OwnObjects, objects_of, status_text
from rackloom.web.viewers import Session, Viewer, session_of

ACTIONS = "/map/actions"
FORWARDED_FOR = b"x-forwarded-for"
TICKET_FIELDS = frozenset({"ticket", "proof", "plan"})
"""The fields of a form besides the fields of its action."""
STALE = "The site has changed since that plan was shown. Nothing was done; this is the plan now."
LONGEST_SHOWN = 256
"""Characters of a field that a refused form shows again. Names are no longer."""
_BUTTONS = {
    Action.CARVE: "Carve it",
    Action.BATCH: "Order these machines",
    Action.RELEASE: "Release them for good",
}


class ActionPages:
    """The pages. `api` is the application of REST, and `clock` gives seconds since the epoch."""

    def __init__(self, api: ASGIApp, clock: Callable[[], float]) -> None:
        self._api = api
        self._clock = clock
        self._done = OrdersDone(clock, TICKET_SECONDS)

    async def overview(self, request: Request, viewer: Viewer) -> Response:
        """The forms and the objects of the tenant. `done` in the address names an order to report on."""
        if viewer.operator:
            return _for_tenants_only(viewer)
        given = tuple(request.query_params.multi_items())
        outcome = self._done.find(viewer.name, dict(given).get("done", ""))
        return await self._overview(request, viewer, fields=given, outcome=outcome)

    async def plan(self, request: Request, viewer: Viewer) -> Response:
        """The plan of an action."""
        if viewer.operator:
            return _for_tenants_only(viewer)
        action, fields = _action_of(request), tuple(request.query_params.multi_items())
        return await self._answer(request, viewer, action, fields, lambda asked: self._plan(request, asked))

    async def order(self, request: Request, viewer: Viewer) -> Response:
        """Carry out a plan."""
        action = _action_of(request)
        if viewer.operator:
            return _for_tenants_only(viewer)
        if not is_same_origin(request):
            return await self._refusal(request, viewer, "The form was sent from another site.", 403)
        form = await read_form(request)
        if form is None:
            return await self._refusal(request, viewer, f"The form has more than {FORM_BYTES} bytes.", 413)
        session, given = session_of(request), dict(form)
        ticket = Ticket(given.get("ticket", ""), given.get("proof", ""))
        problem = ticket_problem(session, action, ticket, self._clock())
        if problem is not None:
            return await self._refusal(request, viewer, problem, 403)
        fields = tuple((name, value) for name, value in form if name not in TICKET_FIELDS)

        async def carry_out(asked: Asked) -> Response:
            await self._done.once(
                viewer.name, ticket.id, lambda: self._carry_out(request, asked, given.get("plan", ""))
            )
            return RedirectResponse(f"{ACTIONS}?done={ticket.id}", 303)

        return await self._answer(request, viewer, action, fields, carry_out)

    async def _answer(
        self,
        request: Request,
        viewer: Viewer,
        action: Action,
        fields: Fields,
        work: Callable[[Asked], Awaitable[Response]],
    ) -> Response:
        """The answer of `work` for the fields of an action, or the forms and the reason if it is refused."""
        try:
            return await work(asked_for(action, fields))
        except _Stale as stale:
            return self._plan_page(request, stale.plan, STALE, 409)
        except Misuse as error:
            return await self._refusal(request, viewer, error.reason, 400, fields)
        except Refused as error:
            status = getattr(error, "status", None) or 409
            return await self._refusal(request, viewer, _refusal_text(error), status, fields)

    async def _plan(self, request: Request, asked: Asked) -> Response:
        async with self._rest(request) as client:
            plan = await planned(client, asked)
        return self._plan_page(request, plan)

    def _plan_page(
        self, request: Request, plan: ActionPlan, trouble: str = "", status: int = 200
    ) -> Response:
        session = session_of(request)
        ticket = new_ticket(session, plan.action, self._clock())
        return HTMLResponse(_render_plan(session.org, plan, ticket, trouble), status)

    async def _carry_out(self, request: Request, asked: Asked, plan_id: str) -> Outcome:
        """Raises _Stale, and the errors of the client if nothing was done."""
        done: list[str] = []
        async with self._rest(request) as client:
            plan = await planned(client, asked)
            if plan.id != plan_id:
                raise _Stale(plan)
            try:
                async for sentence in carried_out(client, plan):
                    done.append(sentence)  # noqa: PERF401 - what was done before an error counts
            except (Refused, Retry, Unknown) as error:
                if not done:
                    raise
                return Outcome(done=tuple(done), problem=f"Not all was done: {error.reason}")
        return Outcome(done=tuple(done))

    async def _refusal(
        self, request: Request, viewer: Viewer, trouble: str, status: int, fields: Fields = ()
    ) -> Response:
        return await self._overview(request, viewer, trouble=trouble, status=status, fields=fields)

    async def _overview(
        self,
        request: Request,
        viewer: Viewer,
        *,
        trouble: str = "",
        status: int = 200,
        fields: Fields = (),
        outcome: Outcome | None = None,
    ) -> Response:
        own: OwnObjects | None = None
        try:
            async with self._rest(request) as client:
                own = await objects_of(client)
        except Refused as error:
            trouble, status = trouble or _refusal_text(error), status if trouble else 403
        shown = _render_overview(viewer.org, own, trouble=trouble, fields=fields, outcome=outcome)
        return HTMLResponse(shown, status)

    def _rest(self, request: Request) -> AsyncClient:
        """A client of REST that is the viewer, at the viewer's address."""
        session = session_of(request)
        return rest_client(self._api, session, request.scope)


class _Stale(Exception):
    """The plan differs from the one that the tenant has read."""

    def __init__(self, plan: ActionPlan) -> None:
        super().__init__("the plan has changed")
        self.plan = plan


def rest_client(api: ASGIApp, session: Session, sender: Scope) -> AsyncClient:
    """A client of REST in this process, for a session. Its requests come from the address of `sender`."""
    forwarded = [header for header in sender["headers"] if header[0] == FORWARDED_FOR]

    async def from_sender(scope: Scope, receive: Receive, send: Send) -> None:
        headers = [*scope["headers"], *forwarded]
        await api({**scope, "client": sender.get("client"), "headers": headers}, receive, send)

    return AsyncClient(
        # The address is never called: the transport is the application itself.
        Connection(url="http://127.0.0.1", org=session.org, token=session.token),
        retries=RetryPolicy(attempts=1),
        transport=httpx2.ASGITransport(app=from_sender),
    )


def _action_of(request: Request) -> Action:
    try:
        return Action(request.path_params["action"])
    except ValueError:
        raise HTTPException(404) from None


def _for_tenants_only(viewer: Viewer) -> Response:
    """The answer to operators, who use `rackloom admin` to change machines."""
    return HTMLResponse(render_template("tenants_only.html", org=viewer.org), 403)


def _refusal_text(error: Refused) -> str:
    """The reason, and the nearest fix if there is one."""
    return error.reason if error.nearest_fix is None else f"{error.reason}. Nearest fix: {error.nearest_fix}"


# Markup, by the same escaping templates as the map.


def _render_overview(
    org: str, own: OwnObjects | None, *, trouble: str, fields: Fields, outcome: Outcome | None
) -> str:
    """The forms, filled in with `fields`. Without objects (None) they offer no choices."""
    return render_template(
        "actions.html",
        org=org,
        own=own,
        trouble=trouble,
        given={name: value[:LONGEST_SHOWN] for name, value in fields},
        chosen={value for name, value in fields if name == "instance"},
        outcome=outcome,
        status_text=status_text,
        most_released=MOST_RELEASED,
    )


def _render_plan(org: str, plan: ActionPlan, ticket: Ticket, trouble: str) -> str:
    """A plan, with the form that carries it out."""
    return render_template(
        "plan.html", org=org, plan=plan, ticket=ticket, trouble=trouble, button=_BUTTONS[plan.action]
    )
