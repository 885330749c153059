"""The simulated NMX-M keeps the rules of the real one, as far as they are known."""

import asyncio
from collections.abc import Awaitable, Callable

import httpx2
import pytest
from tests.lab.switches.nmxm_server import NmxmServer

from rackloom.core.partitions.domain import DEFAULT_PARTITION_ID
from rackloom.lab.switches.fabric import FabricGpu, FabricPartition, SimulatedFabric
from rackloom.lab.switches.faults import NmxmFault
from rackloom.lab.switches.nmxm import gpu_entity_id

GUIDS = (11, 12, 13, 14)
MEMBERS = [gpu_entity_id(guid) for guid in GUIDS]
ABSENT = "0" * 24
Scenario = Callable[[NmxmServer, httpx2.AsyncClient], Awaitable[None]]


def rack() -> SimulatedFabric:
    gpus = (
        FabricGpu(
            guid=guid, chassis_serial="C", chassis_id=3, slot=1, host_id=1, tray_index=0, module_id=module
        )
        for module, guid in enumerate(GUIDS, 1)
    )
    return SimulatedFabric("00000000-0000-4000-8000-00000000d001", gpus)


def run(scenario: Scenario, fabric: SimulatedFabric | None = None, seconds: float = 0.0) -> None:
    async def opened() -> None:
        async with (
            NmxmServer([fabric or rack()], seconds=seconds) as server,
            httpx2.AsyncClient(base_url=server.url, auth=("rw-user", "simulated")) as http,
            asyncio.timeout(120),
        ):
            await scenario(server, http)

    asyncio.run(opened())


async def finished(http: httpx2.AsyncClient, answer: httpx2.Response) -> dict[str, object]:
    assert answer.status_code == 202, answer.text
    entity = answer.json()["operationId"]
    assert answer.headers["location"] == f"/nmx/v1/operations/{entity}"
    while True:
        found: dict[str, object] = (await http.get(f"operations/{entity}")).json()
        if found["Status"] not in ("pending", "in-progress"):
            return found
        await asyncio.sleep(0.005)


async def empty(http: httpx2.AsyncClient) -> None:
    (default,) = (await http.get("partitions")).json()
    assert default["PartitionID"] == DEFAULT_PARTITION_ID
    assert (await finished(http, await http.delete(f"partitions/{default['ID']}")))["Status"] == "completed"


def test_it_says_that_it_is_a_simulation() -> None:
    async def scenario(_: NmxmServer, http: httpx2.AsyncClient) -> None:
        assert "simulated" in (await http.get("chassis")).headers["server"]

    run(scenario)


@pytest.mark.slow
@pytest.mark.parametrize(
    "header", [None, "Basic", "Basic %%%", "Basic cm9vdDpyb290", "Bearer cnctdXNlcjpzaW11bGF0ZWQ="]
)
def test_nobody_is_served_without_the_password(header: str | None) -> None:
    async def scenario(_: NmxmServer, http: httpx2.AsyncClient) -> None:
        http.auth = None
        answer = await http.get("gpus", headers={"Authorization": header} if header else {})
        assert answer.status_code == 401
        assert answer.json()["httpErrorCode"] == 401

    run(scenario)


@pytest.mark.slow
def test_a_change_is_accepted_then_under_way_then_done() -> None:
    async def scenario(server: NmxmServer, http: httpx2.AsyncClient) -> None:
        await empty(http)
        answer = await http.post("partitions", json={"Name": "one", "Members": MEMBERS[:2]})
        begun = (await http.get(f"operations/{answer.json()['operationId']}")).json()
        assert begun["Status"] == "pending"
        assert begun["Request"] == {
            "Method": "post",
            "URI": "/nmx/v1/partitions",
            "Body": {"Name": "one", "Members": MEMBERS[:2]},
            "Cancellable": True,
        }
        assert (await http.get("partitions")).json() == []
        assert (await finished(http, answer))["Status"] == "completed"
        (made,) = (await http.get("partitions")).json()
        assert (made["Name"], made["Type"], made["Members"]) == ("one", "ID_BASED", MEMBERS[:2])
        assert [gpu["PartitionID"] for gpu in (await http.get("gpus")).json()] == [1, 1, 0, 0]

    run(scenario, seconds=0.2)


def test_a_put_replaces_all_members() -> None:
    async def scenario(_: NmxmServer, http: httpx2.AsyncClient) -> None:
        await empty(http)
        await finished(http, await http.post("partitions", json={"Name": "one", "Members": MEMBERS[:2]}))
        (made,) = (await http.get("partitions")).json()
        path = f"partitions/{made['ID']}"
        assert (await finished(http, await http.put(path, json={"Members": MEMBERS[1:3]})))[
            "Status"
        ] == "completed"
        assert (await http.get(path)).json()["Members"] == MEMBERS[1:3]
        await finished(http, await http.put(path, json={"Members": []}))
        assert (await http.get(path)).json()["Members"] is None

    run(scenario)


def test_what_cannot_be_is_refused_at_once() -> None:
    fabric = rack()
    fabric.put(FabricPartition(id=8, name="seats", guids=(14,), guid_based=False))

    async def scenario(_: NmxmServer, http: httpx2.AsyncClient) -> None:
        partitions = (await http.get("partitions")).json()
        by_location = next(entry for entry in partitions if entry["PartitionID"] == 8)
        assert by_location["Type"] == "LOCATION_BASED"
        assert by_location["Members"][0]["DeviceID"] == 4
        answers = [
            (400, await http.post("partitions", json={"Name": "x"})),
            (400, await http.post("partitions", json={"Name": "", "Members": MEMBERS})),
            (400, await http.post("partitions", json={"Name": "x" * 245, "Members": MEMBERS})),
            (400, await http.post("partitions", json={"Name": "x", "Members": []})),
            (400, await http.post("partitions", json={"Name": "x", "Members": MEMBERS[:1] * 2})),
            (400, await http.post("partitions", content=b"{")),
            (404, await http.post("partitions", json={"Name": "x", "Members": [ABSENT]})),
            (409, await http.post("partitions", json={"Name": "seats", "Members": MEMBERS[:1]})),
            (409, await http.put(f"partitions/{by_location['ID']}", json={"Members": MEMBERS[:1]})),
            (404, await http.put(f"partitions/{ABSENT}", json={"Members": MEMBERS[:1]})),
            (404, await http.get(f"operations/{ABSENT}")),
            (404, await http.get("switches")),
            (404, await http.post("gpus", json={})),
        ]
        assert [answer.status_code for _, answer in answers] == [status for status, _ in answers]
        assert all(answer.json()["customErrorCode"] for _, answer in answers)

    run(scenario, fabric)


def test_what_the_fabric_refuses_fails_as_an_operation() -> None:
    async def scenario(_: NmxmServer, http: httpx2.AsyncClient) -> None:
        # Every GPU is in the factory default partition.
        failed = await finished(http, await http.post("partitions", json={"Name": "x", "Members": MEMBERS}))
        assert failed["Status"] == "failed"
        assert failed["Result"] == {
            "Data": None,
            "Error": "RESOURCE_IN_USE",
            "Details": "simulated: RESOURCE_IN_USE",
        }

    run(scenario)


def test_an_operation_can_be_cancelled_until_it_has_ended() -> None:
    async def scenario(server: NmxmServer, http: httpx2.AsyncClient) -> None:
        await empty(http)
        server.faults.next("POST partitions", NmxmFault(stalls=True))
        begun = await http.post("partitions", json={"Name": "x", "Members": MEMBERS})
        path = f"operations/{begun.json()['operationId']}"
        assert (await http.delete(path)).status_code == 202
        assert (await finished(http, begun))["Status"] == "cancelled"
        assert (await http.delete(path)).status_code == 409
        server.service.operations.resume()
        assert (await http.get("partitions")).json() == []

    run(scenario)


def test_counts_and_lists_agree() -> None:
    async def scenario(_: NmxmServer, http: httpx2.AsyncClient) -> None:
        for name, number in (("chassis", 1), ("compute-nodes", 1), ("gpus", 4)):
            assert len((await http.get(name)).json()) == number
            assert (await http.get(f"{name}/count")).json() == {"total": number}
        (chassis,) = (await http.get("chassis")).json()
        assert (chassis["SerialNumber"], chassis["InternalID"]) == ("C", 3)

    run(scenario)
