"""Fetching rows only if digests differ gives the rows of a full read."""

import sqlalchemy as sa
from hypothesis import example, given
from hypothesis import strategies as st

from rackloom.app.snapshot.cache import ReadCache
from rackloom.app.snapshot.records import RowGroups

TABLE = sa.Table(
    "thing",
    sa.MetaData(),
    sa.Column("place", sa.Text),
    sa.Column("number", sa.Integer),
    sa.Column("name", sa.Text, nullable=True),
    sa.Column("other", sa.Text, nullable=True),
    sa.Column("size", sa.Integer, nullable=True),
)
NAMES = st.none() | st.sampled_from(["", "-", " ", "a", "a ", " a", "a b", "b", "None", "1"])
ROWS = st.dictionaries(
    st.tuples(st.sampled_from("xyz"), st.integers(0, 3)),
    st.tuples(NAMES, NAMES, st.none() | st.integers(0, 2)),
)
ORDERED = sa.select(TABLE).order_by(TABLE.c.place, TABLE.c.number)


def written(conn, rows):
    conn.execute(sa.delete(TABLE))
    reported = [dict(zip(TABLE.c.keys(), (*key, *value), strict=True)) for key, value in rows.items()]
    if reported:
        conn.execute(sa.insert(TABLE), reported)


@example([{("x", 0): ("a b", "", None)}, {("x", 0): ("a", "b", None)}, {("x", 0): ("a", None, 1)}])
@example([{("x", 0): ("1", None, None)}, {("x", 0): (None, "1", None)}, {("x", 0): (None, "", 1)}])
@given(st.lists(ROWS, max_size=5))
def test_what_is_remembered_is_what_the_table_has(story):
    known, groups = ReadCache(), RowGroups(ORDERED)
    engine = sa.create_engine("sqlite://")
    with engine.connect() as conn:
        TABLE.create(conn)
        before = {}
        for rows in story:
            written(conn, rows)
            found = groups.of(conn, known)
            assert [row for some in found.values() for row in some] == conn.execute(ORDERED).all()
            assert all({row.place for row in some} == {name} for name, some in found.items())
            same = [name for name in found if before.get(name) == found[name]]
            assert all(found[name] is before[name] for name in same)
            before = found
    engine.dispose()
