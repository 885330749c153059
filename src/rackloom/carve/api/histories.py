"""Status histories over REST, the same for every kind of object."""

from collections.abc import Callable

import sqlalchemy as sa
from starlette.responses import Response

from rackloom.carve.api import respond
from rackloom.carve.api.deps import ApiDeps
from rackloom.carve.api.queries import PageQuery
from rackloom.carve.api.respond import Json
from rackloom.carve.api.shapes import status_history
from rackloom.carve.site import history


async def answer(
    deps: ApiDeps, query: PageQuery, object_id: str, check: Callable[[sa.Connection], object]
) -> Response:
    """The history of an object, newest first. `check` refuses a caller that may not see the object."""

    def read(conn: sa.Connection) -> list[Json]:
        check(conn)
        return status_history(history.of(conn, [object_id])[object_id])

    return respond.sliced(await deps.store.read(read), query.page)
