"""RPCs of a takeover from NICo: our site for the planner, and one step of a plan at a time.

The plan is made where NICo is read, by `rackloom admin import nico`, so no token of NICo reaches the site.
The site decides about each step itself, in one transaction, whatever the plan says.
"""

import msgspec
import sqlalchemy as sa

from rackloom.carve.admin import operator_pb2 as pb
from rackloom.carve.admin.deps import AdminDeps
from rackloom.carve.store.values import Changed, invalid
from rackloom.carve.takeover.site_reading import read_site
from rackloom.carve.takeover.steps import StepOrder, StepOutcome, do_step, undo_step
from rackloom.core.takeover.records import Step
from rackloom.errors import Undecodable
from rackloom.runtime.foreign_text import decode_json

_encoder = msgspec.json.Encoder()


async def show_site(deps: AdminDeps, _request: pb.TakeoverSiteRequest) -> pb.TakeoverSite:
    """What a plan depends on."""
    return pb.TakeoverSite(
        reading=_encoder.encode(await deps.store.read(read_site, deps.valid_from())).decode()
    )


async def run_step(deps: AdminDeps, request: pb.TakeoverStepRequest) -> pb.TakeoverStepReply:
    """Do or undo one step."""
    try:
        step = decode_json(request.step, "the request", Step)
    except Undecodable as error:
        raise invalid(f"this is not a step of a takeover: {error.reason}") from error

    def work(conn: sa.Connection) -> Changed[StepOutcome]:
        # The order is dated inside the transaction, as for every operator step.
        order = StepOrder(deps.order(request.reason), deps.ids, deps.valid_from())
        return undo_step(conn, step, order) if request.undo else do_step(conn, step, order)

    outcome = await deps.change(work)
    return pb.TakeoverStepReply(state=outcome.state, message=outcome.message)
