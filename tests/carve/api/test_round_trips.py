"""How often a write over REST waits for PostgreSQL: BEGIN, the lock of writers and COMMIT count, too."""

from collections.abc import Callable
from typing import Any

import pytest
from asyncpg.connection import Connection
from asyncpg.prepared_stmt import PreparedStatement

pytestmark = pytest.mark.parametrize("database", ["postgresql"], indirect=True, scope="session")


@pytest.fixture
def trips(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What the driver sends, each in one round trip. Statements are prepared once on each connection."""
    sent: list[str] = []

    def note(kind: Any, method: str, text_of: Callable[..., str]) -> None:
        unpatched = getattr(kind, method)

        def noting(self: Any, *given: Any, **options: Any) -> Any:
            sent.append(text_of(self, *given))
            return unpatched(self, *given, **options)

        monkeypatch.setattr(kind, method, noting)

    note(Connection, "execute", lambda _, query, *_given: query)
    note(Connection, "executemany", lambda _, query, *_given: query)
    note(PreparedStatement, "fetch", lambda statement, *_given: statement.get_query())
    return sent


def test_a_write_of_a_tenant_has_few_round_trips(api: Any, trips: list[str]) -> None:
    def counted(work: Callable[..., Any], *given: str) -> tuple[Any, int]:
        trips.clear()
        return work(*given), len(trips)

    # The first round prepares the statements.
    for name in ("first", "second"):
        partition, creating = counted(api.partition, name)
        vpc, creating_vpc = counted(api.vpc, name)
        deleting_vpc = counted(api.delete, f"vpc/{vpc}")[1]
        vpc, creating_with_default = counted(api.vpc, name, partition)
        api.delete(f"vpc/{vpc}")
        deleting = counted(api.delete, f"nvlink-logical-partition/{partition}")[1]
    assert {creating, deleting, creating_vpc, deleting_vpc} == {5}
    assert creating_with_default == 6
