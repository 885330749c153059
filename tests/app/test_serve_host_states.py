"""The state of hosts as a provider reports it: only a clear answer is Ready."""

import asyncio
import json

import httpx2
import pytest
import sqlalchemy as sa

from rackloom.app.site import host_state
from rackloom.app.site.host_state import HostStatePoller
from rackloom.carve.inventory.enrolment import MachineRecord, enrol_machines, ensure_site
from rackloom.carve.store.database import Store
from rackloom.carve.store.schema import machine
from rackloom.core.partitions.domain import DefaultPartitionPolicy
from rackloom.lab.virtual import event_loop
from rackloom.topology.join_key import Source


def _furnish(conn):
    ids = iter("ps")
    site = ensure_site(conn, "lab", "acme", DefaultPartitionPolicy.NONE, 1.0, lambda: next(ids))
    records = [
        MachineRecord(chassis_serial="C", slot=slot, tray_index=0, rack="r", gpus=4) for slot in (0, 1)
    ]
    enrol_machines(conn, site, records, Source.DECLARED, "Unknown", 1.0)
    conn.execute(sa.update(machine).values(domain="d1"))


def _statuses(conn):
    return {row.id: row.status for row in conn.execute(sa.select(machine))}


class Provider:
    """Gives the answers of `answers`."""

    def __init__(self):
        self.answers = {}
        self.asked = []

    def __call__(self, request):
        self.asked.append(request.url.path)
        return self.answers.get(request.url.path.rpartition("/")[2], httpx2.Response(404))


@pytest.fixture
def asked():
    """Asks once, in virtual time, and gives the statuses, and the domains that changed."""
    provider = Provider()
    store = Store.inline()
    asyncio.run(store.run(_furnish))
    hosts = HostStatePoller("http://hosts.test/v1/", 60.0, store, lambda: 2.0, httpx2.MockTransport(provider))

    def ask(**answers):
        provider.answers = {name.replace("_", "-"): answer for name, answer in answers.items()}

        async def scenario():
            return await hosts.ask(), await store.read(_statuses)

        return event_loop.run_simulation(1, scenario)

    yield ask
    asyncio.run(store.close())


def reported_state(state):
    return httpx2.Response(200, content=json.dumps(state))


def test_a_ready_host_is_ready_and_a_silent_one_is_not(asked):
    changed, statuses = asked(c_0=reported_state({"state": "ready"}))
    assert statuses == {"c-0": "Ready", "c-1": "Unknown"}
    assert changed == {"d1"}
    assert asked(c_0=reported_state({"state": "ready"})) == (frozenset(), statuses)
    assert asked(c_0=reported_state({"state": "error"}))[1]["c-0"] == "Error"
    assert asked(c_0=reported_state({"state": "initializing"}))[1]["c-0"] == "Initializing"


@pytest.mark.parametrize(
    "answer",
    [
        httpx2.Response(500, content='{"state": "ready"}'),
        reported_state({"state": "READY "}),
        reported_state({"state": ["ready"]}),
        reported_state({}),
        reported_state(["ready"]),
        httpx2.Response(200, content="ready"),
        httpx2.Response(200, content="[" * 100_000),
        httpx2.Response(200, content=json.dumps({"state": "ready", "also": "x" * host_state.MAX_BYTES})),
    ],
)
def test_what_is_not_understood_is_unknown(asked, answer):
    both = {"c_0": reported_state({"state": "ready"}), "c_1": reported_state({"state": "ready"})}
    asked(**both)
    assert asked(**both | {"c_0": answer})[1] == {"c-0": "Unknown", "c-1": "Ready"}


def test_an_answer_that_never_ends_holds_up_nobody(asked):
    """A byte now and then keeps every timeout between two bytes from coming."""

    class Drip(httpx2.AsyncByteStream):
        async def __aiter__(self):
            while True:
                yield b" "
                await asyncio.sleep(0.01)

    asked(c_0=reported_state({"state": "ready"}))
    dripping = httpx2.Response(200, stream=Drip())
    assert asked(c_0=dripping, c_1=reported_state({"state": "ready"}))[1] == {
        "c-0": "Unknown",
        "c-1": "Ready",
    }
