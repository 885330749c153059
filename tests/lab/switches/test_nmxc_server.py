"""The simulated controller called through a bare stub: calls that the driver does not use, and the faults."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import grpc
import grpc.aio
import pytest

from rackloom.carve.fabric.nmxc import nmx_c_pb2 as pb
from rackloom.carve.fabric.nmxc.nmx_c_pb2_grpc import NMX_ControllerStub
from rackloom.lab.switches.fabric import FabricGpu, SimulatedFabric
from rackloom.lab.switches.servers import NmxcServer

OPTIONS = (("grpc.enable_http_proxy", 0), ("grpc.use_local_subchannel_pool", 1))

GPU_LIST = pb.GetGpuInfoListRequest(context=pb.Context(), attr=pb.NMX_GPU_ATTR_ALL, gateway_id="test")
PARTITION_LIST = pb.GetPartitionInfoListRequest(context=pb.Context(), gateway_id="test")


@pytest.fixture
def fabric() -> SimulatedFabric:
    gpus = [
        FabricGpu(
            guid=number,
            chassis_serial="C",
            chassis_id=3,
            slot=number,
            host_id=number,
            tray_index=number,
            module_id=1,
        )
        for number in (1, 2, 3)
    ]
    return SimulatedFabric("00000000-0000-4000-8000-00000000d001", gpus)


def ask(fabric: SimulatedFabric, question: Callable[[Any, NmxcServer], Awaitable[Any]]) -> Any:
    async def scenario() -> Any:
        async with asyncio.timeout(120), NmxcServer(fabric) as server, _at(server.url) as stub:
            return await question(stub, server)

    return asyncio.run(scenario())


@asynccontextmanager
async def _at(url: str) -> AsyncIterator[Any]:
    async with grpc.aio.insecure_channel(url.removeprefix("http://"), options=OPTIONS) as channel:
        yield NMX_ControllerStub(channel)


def code(reply: Any) -> int:
    return int(reply.server_header.return_code)


def test_hello_answers_in_the_clients_version(fabric: SimulatedFabric) -> None:
    hello = pb.ClientHello(gateway_id="me", major_version=2, minor_version=20)
    reply = ask(fabric, lambda stub, _: stub.Hello(hello))
    assert (reply.server_header.domain_uuid, code(reply)) == (fabric.domain, pb.NMX_ST_SUCCESS)
    assert (reply.major_version, reply.minor_version) == (2, 20)


def test_trays_are_listed_with_the_partitions_they_take_part_in(fabric: SimulatedFabric) -> None:
    fabric.remove(32766, [2])
    reply = ask(fabric, lambda stub, _: stub.GetComputeNodeInfoList(pb.GetComputeNodeInfoListRequest()))
    nodes = {
        node.loc.location.slot_id: [held.partition_id for held in node.partition_id_list]
        for node in reply.node_info_list
    }
    assert nodes == {1: [32766], 2: [], 3: [32766]}


def test_the_domain_state_counts_free_multicast_groups(fabric: SimulatedFabric) -> None:
    async def free(stub: Any, _: NmxcServer) -> list[int]:
        before = await stub.GetDomainStateInfo(pb.GetDomainStateInfoRequest())
        fabric.delete(32766)
        fabric.create("a", [1], multicast_groups=16)
        after = await stub.GetDomainStateInfo(pb.GetDomainStateInfoRequest())
        return [before.available_multicast_groups, after.available_multicast_groups]

    assert ask(fabric, free) == [0, 1008]


def test_partitions_can_be_asked_for_by_id_and_by_name(fabric: SimulatedFabric) -> None:
    fabric.remove(32766, [1, 2])
    fabric.create("a", [1])
    fabric.create("b", [2])

    async def names(stub: Any, _: NmxcServer) -> list[list[str]]:
        requests = (
            pb.GetPartitionInfoListRequest(),
            pb.GetPartitionInfoListRequest(partition_id_list=[pb.PartitionId(partition_id=2)]),
            pb.GetPartitionInfoListRequest(partition_name_list=["a", "c"]),
        )
        replies = [await stub.GetPartitionInfoList(request) for request in requests]
        return [[partition.name for partition in reply.partition_info_list] for reply in replies]

    assert ask(fabric, names) == [["a", "b", "Default Partition"], ["b"], ["a"]]


def test_what_is_not_simulated_says_so(fabric: SimulatedFabric) -> None:
    async def answers(stub: Any, _: NmxcServer) -> list[int]:
        by_seat = pb.GpuResourceId(gpu_location=pb.GpuLocation(gpu_id=1))
        return [
            code(await stub.GetGpuInfoList(pb.GetGpuInfoListRequest(attr=pb.NMX_GPU_ATTR_LOCATION))),
            code(await stub.CreatePartition(pb.CreatePartitionRequest(gpu_resource_id=[by_seat]))),
        ]

    assert ask(fabric, answers) == [pb.NMX_ST_NOT_SUPPORTED] * 2


def test_a_client_can_be_spared_its_own_changes(fabric: SimulatedFabric) -> None:
    async def heard(stub: Any, _: NmxcServer) -> list[str | None]:
        call = stub.Subscribe(pb.SubscribeRequest(gateway_id="me"))
        kinds = [(await call.read()).WhichOneof("notification")]
        away = pb.DeletePartitionRequest(partition_id=pb.PartitionId(partition_id=32766), gateway_id="me")
        await stub.DeletePartition(away)
        made = pb.CreatePartitionRequest(
            name="a", gpu_resource_id=[pb.GpuResourceId(gpu_uid=1)], gateway_id="somebody"
        )
        await stub.CreatePartition(made)
        kinds.append((await call.read()).WhichOneof("notification"))
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(call.read(), 0.05)
        return kinds

    assert ask(fabric, heard) == ["subscription_response", "fm_event"]


@pytest.mark.slow
def test_heart_beats_come_when_nothing_else_does(fabric: SimulatedFabric) -> None:
    async def heard(stub: Any, _: NmxcServer) -> list[str | None]:
        call = stub.Subscribe(pb.SubscribeRequest(gateway_id="me", heart_beat_rate=1))
        kinds = [(await call.read()).WhichOneof("notification") for _ in range(2)]
        call.cancel()
        return kinds

    assert ask(fabric, heard) == ["subscription_response", "domain_state_info"]


def test_faults_hit_one_call_each_in_the_order_asked_for(fabric: SimulatedFabric) -> None:
    async def codes(stub: Any, server: NmxcServer) -> list[int]:
        server.faults.refuse_next("Hello", "NOT_READY")
        server.faults.refuse_next("Hello", "IN_USE")
        return [code(await stub.Hello(pb.ClientHello())) for _ in range(3)]

    assert ask(fabric, codes) == [pb.NMX_ST_NOT_READY, pb.NMX_ST_IN_USE, pb.NMX_ST_SUCCESS]


def test_two_controllers_do_not_share_a_port(fabric: SimulatedFabric) -> None:
    async def second(_: Any, server: NmxcServer) -> None:
        port = int(server.url.rsplit(":", 1)[1])
        with pytest.raises(OSError, match="in use"):
            await NmxcServer(fabric, port=port).come_back()

    ask(fabric, second)


def test_the_port_is_kept_across_an_absence(fabric: SimulatedFabric) -> None:
    async def urls(_: Any, server: NmxcServer) -> list[str]:
        before = server.url
        await server.go_away()
        await server.go_away()
        await server.come_back()
        return [before, server.url]

    before, after = ask(fabric, urls)
    assert before == after


def test_who_listens_is_told_to_come_back_in_vain(fabric: SimulatedFabric) -> None:
    async def url_and_answer(_: Any, server: NmxcServer) -> tuple[str, str, Any]:
        await server.go_away()
        await server.move()
        url = server.url
        await server.come_back()
        async with _at(url) as leader:
            return url, server.url, await leader.GetGpuInfoList(GPU_LIST)

    before, after, listed = ask(fabric, url_and_answer)
    assert before == after
    assert len(listed.gpu_info_list) == len(fabric.gpus)


def test_a_standby_knows_the_domain_and_none_of_its_gpus(fabric: SimulatedFabric) -> None:
    async def question(_: Any, server: NmxcServer) -> tuple[Any, Any, Any, bool]:
        url = await server.stand_by()
        async with _at(url) as standby:
            hello = await standby.Hello(pb.ClientHello(major_version=2, minor_version=20))
            gpus = await standby.GetGpuInfoList(GPU_LIST)
            partitions = await standby.GetPartitionInfoList(PARTITION_LIST)
        return hello, gpus, partitions, await server.stand_by() == url != server.url

    hello, gpus, partitions, is_the_same = ask(fabric, question)
    assert (hello.server_header.domain_uuid, code(hello)) == (fabric.domain, pb.NMX_ST_SUCCESS)
    assert (code(gpus), list(gpus.gpu_info_list)) == (pb.NMX_ST_SUCCESS, [])
    assert code(partitions) == pb.NMX_ST_SUCCESS
    assert [partition.num_gpus for partition in partitions.partition_info_list] == [0]
    assert is_the_same


def test_a_leader_moves_to_where_the_standby_was(fabric: SimulatedFabric) -> None:
    async def question(stub: Any, server: NmxcServer) -> tuple[Any, Any]:
        old, url = server.url, await server.stand_by()
        await server.move()
        assert (server.url, await server.stand_by()) != (old, old)
        assert server.url == url
        with pytest.raises(grpc.aio.AioRpcError) as error:
            await stub.GetGpuInfoList(GPU_LIST)
        async with _at(url) as leader:
            return error.value.code(), await leader.GetGpuInfoList(GPU_LIST)

    silence, listed = ask(fabric, question)
    assert silence is grpc.StatusCode.UNAVAILABLE
    assert len(listed.gpu_info_list) == len(fabric.gpus)


def test_an_old_leader_leads_with_what_it_knew_until_it_yields(fabric: SimulatedFabric) -> None:
    async def question(stub: Any, server: NmxcServer) -> list[tuple[int, int]]:
        old = server.url
        await server.move()
        fabric.remove_gpus([min(fabric.gpus)])
        seen = []
        for become in (server.old_leader_returns, server.old_leader_yields, server.old_leader_returns):
            await become()
            async with _at(old) as stale, _at(server.url) as leader:
                answers = [await stub.GetGpuInfoList(GPU_LIST) for stub in (stale, leader)]
            seen.append(tuple(len(answer.gpu_info_list) for answer in answers))
        return seen

    gpus = len(fabric.gpus)
    assert ask(fabric, question) == [(gpus, gpus - 1), (0, gpus - 1), (gpus, gpus - 1)]


def test_a_leader_that_never_moved_has_no_old_one(fabric: SimulatedFabric) -> None:
    async def question(_: Any, server: NmxcServer) -> None:
        await server.old_leader_yields()
        with pytest.raises(RuntimeError, match="never moved"):
            await server.old_leader_returns()

    ask(fabric, question)
