"""The pages of a tenant's actions, written by the same escaping templates as the map."""

from rackloom.web.done_once import Outcome
from rackloom.web.forms import Fields, Ticket
from rackloom.web.render import render_template
from rackloom.web.tenant_actions import MOST_RELEASED, Action, ActionPlan
from rackloom.web.tenant_objects import OwnObjects, status_text

LONGEST_SHOWN = 256
"""Characters of a field that a refused form shows again; names are no longer."""
_BUTTONS = {
    Action.CARVE: "Carve it",
    Action.BATCH: "Order these machines",
    Action.RELEASE: "Release them for good",
}


def render_actions(
    org: str, own: OwnObjects | None, *, trouble: str, fields: Fields, outcome: Outcome | None
) -> str:
    """The forms, filled in with `fields`; without objects (None) there is nothing to choose from."""
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


def render_plan(org: str, plan: ActionPlan, ticket: Ticket, trouble: str) -> str:
    """A plan, with the form that carries it out."""
    return render_template(
        "plan.html", org=org, plan=plan, ticket=ticket, trouble=trouble, button=_BUTTONS[plan.action]
    )


def render_tenants_only(org: str) -> str:
    """What operators read in place of the forms."""
    return render_template("tenants_only.html", org=org)
