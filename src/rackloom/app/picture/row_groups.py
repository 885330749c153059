"""Rows of large tables, in groups of which only those are fetched that tell something new.

To fetch thousands of rows and to compare them is dear, and beside a thread that computes every single one may
wait for a turn. The database says in one row per group what is in it, and hardly any group differs.
"""

from collections.abc import Collection, Mapping, Sequence
from functools import reduce
from itertools import groupby
from operator import add, itemgetter
from typing import Any

import sqlalchemy as sa

from rackloom.app.picture.known import Known

Rows = tuple[Any, ...]
_END, _NOTHING = "\x1f", "\x1e"
"""Written between values, and for none: no name holds a control character."""


class RowGroups:
    """What a statement selects, whose first column names the group that a row is of, and is its order too."""

    def __init__(self, statement: sa.Select[Any]) -> None:
        first, *_ = statement.selected_columns
        told = statement.order_by(None).subquery()
        name, *others = told.c
        text = sa.func.aggregate_strings(reduce(add, map(_word, others)), "")
        self._digests = sa.select(name, text).group_by(name).order_by(name)
        self._some = statement.where(first.in_(sa.bindparam("groups", expanding=True)))

    def of(self, conn: sa.Connection, known: Known) -> Mapping[str, Rows]:
        """All rows by group; where a group is as it was, the very rows that `known` remembers."""
        digests = {row[0]: row[1] for row in conn.execute(self._digests).all()}
        return known.unless(digests, self._fetched, conn)

    def _fetched(self, conn: sa.Connection, groups: Collection[str]) -> Mapping[str, Rows]:
        return _in_groups(conn.execute(self._some, {"groups": list(groups)}).all())


def _in_groups(rows: Sequence[sa.Row[Any]]) -> Mapping[str, Rows]:
    return {name: tuple(some) for name, some in groupby(rows, key=itemgetter(0))}


def _word(column: sa.ColumnElement[Any]) -> sa.ColumnElement[str]:
    """A value as text. SQLite writes fifteen digits of a time: nothing changes twice in ten microseconds."""
    text = column if isinstance(column.type, sa.String) else sa.cast(column, sa.Text)
    return sa.func.coalesce(text, _NOTHING) + _END
