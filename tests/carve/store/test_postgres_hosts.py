"""Several PostgreSQL servers in one URL: which of them a connection goes to."""

import asyncio
import socket
from typing import Any

import asyncpg
import pytest

from rackloom.carve.store import postgres, postgres_hosts
from rackloom.carve.store.database import Store
from rackloom.carve.store.failures import StoreUnavailable
from rackloom.carve.store.postgres_hosts import PostgresServers
from rackloom.errors import Refused


class Servers:
    """Stands in for the driver: what each port does."""

    def __init__(self, **ports: Exception | None) -> None:
        self._ports = {int(name.removeprefix("p")): failure for name, failure in ports.items()}
        self.asked: list[tuple[str, int]] = []
        self.options: dict[str, Any] = {}

    async def connect(self, **options: Any) -> int:
        self.options = options
        self.asked.append((options["host"], options["port"]))
        if (failure := self._ports[options["port"]]) is not None:
            raise failure
        return int(options["port"])


def connected(monkeypatch: pytest.MonkeyPatch, url: str, servers: Servers, times: int = 1) -> list[Any]:
    monkeypatch.setattr(asyncpg, "connect", servers.connect)
    chosen = PostgresServers(url, {"command_timeout": 1.0})

    async def connect() -> list[Any]:
        return [await chosen.connect() for _ in range(times)]

    return asyncio.run(connect())


URL = "postgresql://user:secret@a:1,b:2,c:3/site"
STANDBY = asyncpg.TargetServerAttributeNotMatched("a standby")


def test_the_first_server_that_takes_writes_is_used_and_tried_first_from_then_on(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    servers = Servers(p1=ConnectionRefusedError("gone"), p2=STANDBY, p3=None)
    assert connected(monkeypatch, URL, servers, times=2) == [3, 3]
    assert servers.asked == [("a", 1), ("b", 2), ("c", 3), ("c", 3)]
    assert servers.options["target_session_attrs"] == "read-write"
    assert (servers.options["user"], servers.options["password"]) == ("user", "secret")
    assert servers.options["database"] == "site"


def test_a_silent_server_does_not_use_up_the_time_of_the_next(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(postgres_hosts, "CONNECT_SECONDS", 0.05)
    # It accepts the connection and never answers, as a host that hangs does.
    with socket.create_server(("127.0.0.1", 0)) as silent, socket.create_server(("127.0.0.1", 0)) as other:
        ports = [listener.getsockname()[1] for listener in (silent, other)]
        other.close()
        url = f"postgresql://u@127.0.0.1:{ports[0]},127.0.0.1:{ports[1]}/d"
        with pytest.raises(OSError, match="no server takes writes") as failure:
            asyncio.run(PostgresServers(url, {}).connect())
    assert "TimeoutError" in str(failure.value)
    assert str(failure.value).count(";") == 1


def test_a_silent_server_does_not_cost_its_timeout_at_every_attempt(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(postgres_hosts, "CONNECT_SECONDS", 0.05)
    monkeypatch.setattr(postgres, "ATTEMPT_SECONDS", 0.04)
    connects: list[None] = []
    connect = PostgresServers.connect

    async def counted(servers: PostgresServers) -> Any:
        connects.append(None)
        return await connect(servers)

    monkeypatch.setattr(PostgresServers, "connect", counted)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        url = f"postgresql://u@127.0.0.1:{silent.getsockname()[1]}/d"
        with pytest.raises(StoreUnavailable, match="cannot be reached"):
            asyncio.run(Store.connect(url))
    assert len(connects) == 1


def test_none_that_takes_writes_is_worth_another_try(monkeypatch: pytest.MonkeyPatch) -> None:
    servers = Servers(p1=STANDBY, p2=STANDBY, p3=STANDBY)
    with pytest.raises(ConnectionError, match="no server takes writes: a standby"):
        connected(monkeypatch, URL, servers)


def test_one_server_is_used_whatever_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    servers = Servers(p1=None)
    assert connected(monkeypatch, "postgresql://u@a:1/d", servers) == [1]
    assert "target_session_attrs" not in servers.options


def test_the_url_may_say_which_session_it_wants(monkeypatch: pytest.MonkeyPatch) -> None:
    servers = Servers(p1=None, p2=None)
    connected(monkeypatch, "postgresql://u@a:1,b:2/d?target_session_attrs=any", servers)
    assert servers.options["target_session_attrs"] == "any"


@pytest.mark.parametrize("url", ["mysql://u:secret@a:1,b:2/d", "postgresql://u:secret@a:x,b:2/d"])
def test_a_url_that_is_none_is_refused_without_repeating_it(url: str) -> None:
    with pytest.raises(Refused, match="use postgresql://") as refusal:
        PostgresServers(url, {})
    assert "secret" not in str(refusal.value)
