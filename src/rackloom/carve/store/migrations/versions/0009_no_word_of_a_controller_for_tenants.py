"""What was told to tenants of controllers that cannot be read holds no word of theirs: it may be an address.

Since then what they are told is one of two sentences, and of a refusal the code; here what is kept from
before is written as it would be now.
"""

import re
from collections.abc import Iterator, Sequence
from typing import Any

import sqlalchemy as sa
from alembic import op

revision = "0009"
down_revision = "0008"
branch_labels = None
depends_on = None

DISPUTED = "the switch controllers of the domain contradict one another, or those of another domain"
SILENT = "the switch controllers of the domain cannot be read"
PAGE = 1000
"""Texts that are held in memory at once."""
_READ_BY_TENANTS = (
    ("status_history", ("id",), "message"),
    ("tenant_event", ("tenant_id", "number"), "message"),
    ("nvlink_interface", ("id",), "reason"),
)

_SINCE = r"unknown since \d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z: "
_REFUSED = r"the switch controller refused [a-z-]+ on partition (?:'rl-[\w-]+'|\d+): "
_SAID = re.compile(rf"(?P<doubt>{_SINCE})|the switch controller refused \S+ on partition (?:'[^']*'|\S+): ")
"""What stands before the words of a controller."""
_CODE = re.compile(r"(?:^|: )([A-Z][A-Z0-9]*(?:_[A-Z0-9]+)+|[A-Z]{4,})(?=:|$)")

_PARTITIONS = r"(?:rl-[\w-]+|\d+)(?: and (?:rl-[\w-]+|\d+))*"
_BLOCKERS = (
    "the GPU is on no machine that the site knows in this domain",
    "the switch controller does not list the GPU: its tray is absent, off, or was swapped",
    "the switch controller reports GPU health NO_NVLINK",
    r"the GPU is in partition \d+, which the site did not make",
    f"{_REFUSED}.*",
)
_REASONS = (
    f"{_SINCE}.*",
    "no switch controller has reported this machine yet",
    "no switch controller reports domain [0-9a-f-]{36} any more",
    "waiting for the switch controller to be read after this was asked for",
    "the switch controller lists no GPU: it is a standby, or the rack is empty",
    "the switch controller does not report this GPU",
    "an operation that joins the GPU may still be carried out",
    f"the switch controller lists neither the GPU nor partition {_PARTITIONS}, which may hold it",
    f"partition {_PARTITIONS} also holds a GPU of (?:another tenant|no machine of this site)",
    "the switch controller reports GPU health NO_NVLINK:"
    f" the GPU is in partition {_PARTITIONS}, and shares no memory in it",
    f"(?:the GPU is in no partition yet|the GPU is still in partition {_PARTITIONS})"
    f"(?:: (?:{'|'.join(_BLOCKERS)}))?",
)
_OURS = re.compile(
    f"(?:GPU \\d+: )?(?:{'|'.join(_REASONS)})|{'|'.join(_BLOCKERS)}|the host is [A-Z][a-z]+", re.DOTALL
)


def upgrade() -> None:
    """Apply."""
    conn = op.get_bind()
    for table, key, column in _READ_BY_TENANTS:
        columns: list[sa.ColumnClause[Any]] = [sa.column(name) for name in (*key, column)]
        _rewrite(conn, sa.table(table, *columns), key, column)


def _rewrite(conn: sa.Connection, table: sa.TableClause, key: Sequence[str], column: str) -> None:
    mine = sa.and_(*(table.c[name] == sa.bindparam(f"of_{name}") for name in key))
    change = sa.update(table).where(mine).values({column: sa.bindparam("without")})
    for page in _pages(conn, table, key, column):
        told = [(row, told_to_tenants(row[-1])) for row in page]
        rows = [
            {"without": text} | {f"of_{name}": value for name, value in zip(key, row, strict=False)}
            for row, text in told
            if text != row[-1]
        ]
        if rows:
            conn.execute(change, rows)


def _pages(
    conn: sa.Connection, table: sa.TableClause, key: Sequence[str], column: str
) -> Iterator[Sequence[sa.Row[Any]]]:
    """Keys and texts that may hold words of controllers, by key."""
    told, keys = table.c[column], [table.c[name] for name in key]
    suspect = sa.or_(told.contains("unknown since "), told.contains("the switch controller refused "))
    wanted: sa.Select[Any] = sa.select(*keys, told).where(suspect).order_by(*keys).limit(PAGE)
    page = conn.execute(wanted).all()
    while page:
        yield page
        after = sa.tuple_(*(sa.literal(value) for value in page[-1][:-1]))
        page = conn.execute(wanted.where(sa.tuple_(*keys) > after)).all()


def told_to_tenants(text: str) -> str:
    """`text` without what controllers said: nothing that follows it stays but whole sentences of ours."""
    said = _SAID.search(text)
    if said is None:
        return text
    # The words of a controller may hold a "; " as well, and may look like ours at the beginning.
    told = [one for one in text[said.end() :].split("; ")[1:] if _OURS.fullmatch(one)]
    first = text[: said.end()] + text[said.end() :].split("; ")[0]
    return "; ".join(dict.fromkeys(_part(one) for one in (first, *told)))


def _part(text: str) -> str:
    said = _SAID.search(text)
    if said is None:
        return text
    words = text[said.end() :]
    if said["doubt"] is not None:
        return text[: said.end()] + (DISPUTED if "contradict one another" in words else SILENT)
    code = _CODE.search(words)
    return text[: said.end()] + ("" if code is None else code[1])
