"""Who asks for an operator's step, why, and when."""

from rackloom.carve.api.auth import Caller
from rackloom.carve.api.deps import ApiDeps
from rackloom.carve.api.operator_bodies import Because
from rackloom.carve.site.operator_steps import Order


def order(deps: ApiDeps, caller: Caller, body: Because) -> Order:
    """The order that the caller gives with this body."""
    return Order(caller.subject, body.reason, deps.clock())
