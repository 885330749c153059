"""How lists of wanted values become conditions on rows."""

from collections.abc import Iterable, Sequence
from uuid import UUID

import sqlalchemy as sa

from rackloom.carve.api.parties import Select


def narrowed(listing: Select, *wanted: tuple[sa.ColumnElement[object], Sequence[object]]) -> Select:
    """The rows that have one of the wanted values in each column; no wanted value lets every row pass."""
    for column, values in wanted:
        if values:
            listing = listing.where(column.in_(_stored(values)))
    return listing


def _stored(values: Iterable[object]) -> list[object]:
    """Ids are kept as text."""
    return [str(value) if isinstance(value, UUID) else value for value in values]
