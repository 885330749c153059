"""Forms: read within a limit, and accepted only from a page that this site made for the same session.

A form that changes something must pass two checks. The browser states that a page of this origin sent it
(`is_same_origin`). And it carries a ticket: an unguessable id, with its time, and the HMAC of that id and of
the action, with the token of the session as the key. Another site knows neither the token nor the HMAC,
another session has another key, and a ticket is good for one action and one hour. The server does not store
tickets, so a ticket is also good at another replica, and after a restart.

The id of a ticket also names the order, so that a form that is sent twice has the same id.
"""

import hmac
import re
import secrets
from urllib.parse import parse_qsl, urlsplit

import msgspec
from starlette.requests import Request

from rackloom.web.viewers import Session

FORM_BYTES = 8192
TICKET_SECONDS = 3600.0
"""How long a page with a form may stay open before the form is sent."""
CLOCK_SKEW = 60.0
"""The most by which the clock of another replica may be ahead."""
_TICKET_ID = re.compile(r"([0-9]{1,12})\.[A-Za-z0-9_-]{16,32}")

Fields = tuple[tuple[str, str], ...]
"""Names and values in their order. A name may appear more than once."""


def is_same_origin(request: Request) -> bool:
    """Whether a form was sent from a page of this site. Every current browser states it in a header."""
    site = request.headers.get("sec-fetch-site")
    if site is not None:
        return site == "same-origin"
    origin = request.headers.get("origin")
    return origin is not None and urlsplit(origin).netloc == request.headers.get("host")


async def read_form(request: Request) -> Fields | None:
    """The fields of a form, or None if it is too large."""
    body = b""
    async for chunk in request.stream():
        body += chunk
        if len(body) > FORM_BYTES:
            return None
    return tuple(parse_qsl(body.decode("ascii", "replace"), keep_blank_values=True))


class Ticket(msgspec.Struct, frozen=True):
    """The proof of origin that a page puts into a form."""

    id: str
    proof: str


def new_ticket(session: Session, action: str, now: float) -> Ticket:
    """A ticket for one action of one session."""
    id_ = f"{int(now)}.{secrets.token_urlsafe(16)}"
    return Ticket(id_, _proof(session, action, id_))


def ticket_problem(session: Session, action: str, ticket: Ticket, now: float) -> str | None:
    """The reason why a form with this ticket is not accepted, or None if it is."""
    found = _TICKET_ID.fullmatch(ticket.id)
    proof = _proof(session, action, ticket.id)
    if found is None or not hmac.compare_digest(proof.encode(), ticket.proof.encode("utf-8", "replace")):
        return "The form is not from a page of this session. Nothing was done: look at the plan again."
    if not -CLOCK_SKEW <= now - float(found[1]) < TICKET_SECONDS:
        return "The page of this form is more than an hour old. Nothing was done: look at the plan again."
    return None


def _proof(session: Session, action: str, id_: str) -> str:
    message = f"rackloom map form\n{session.org}\n{action}\n{id_}".encode("utf-8", "replace")
    return hmac.new(session.token.encode(), message, "sha256").hexdigest()
