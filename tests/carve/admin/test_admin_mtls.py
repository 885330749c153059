"""Access control: mutual TLS on a real socket, then the class of the certificate."""

import grpc
import pytest
from google.protobuf.empty_pb2 import Empty

from rackloom.carve.admin import forge_pb2 as pb
from rackloom.carve.admin.server import RPCS, AccessClass


def test_an_admin_reads_and_writes(small_site, admin_server):
    async def scenario():
        async with (
            admin_server.open(admin_server.deps(small_site.store)),
            admin_server.client("admin") as client,
        ):
            made = await client.forge.CreateNvlinkNmxcEndpoint(
                pb.NvlinkNmxcEndpoint(chassis_serial="NEW1", endpoint="https://switch9")
            )
            assert made.chassis_serial == "NEW1"
            listed = await client.forge.ListNvlinkNmxcEndpoints(Empty())
            assert "NEW1" in [entry.chassis_serial for entry in listed.entries]

    small_site.runner.run(scenario())


def test_a_viewer_only_reads(small_site, admin_server, refusal):
    async def scenario():
        async with (
            admin_server.open(admin_server.deps(small_site.store)),
            admin_server.client("viewer") as client,
        ):
            await client.forge.ListNvlinkNmxcEndpoints(Empty())
            for service, stub in (
                ("forge.Forge", client.forge),
                ("rackloom.admin.v1.Operator", client.operator),
            ):
                for name, rpc in RPCS[service].items():
                    if rpc.access is AccessClass.ADMIN:
                        refused = await refusal(getattr(stub, name)(rpc.request()))
                        assert refused.code() is grpc.StatusCode.PERMISSION_DENIED, name
                        assert "viewer" in refused.details()

    small_site.runner.run(scenario())


def test_a_certificate_of_nobody_may_do_nothing(small_site, admin_server, refusal):
    async def scenario():
        async with (
            admin_server.open(admin_server.deps(small_site.store)),
            admin_server.client("stranger") as client,
        ):
            for service, stub in (
                ("forge.Forge", client.forge),
                ("rackloom.admin.v1.Operator", client.operator),
            ):
                for name, rpc in RPCS[service].items():
                    refused = await refusal(getattr(stub, name)(rpc.request()))
                    assert refused.code() is grpc.StatusCode.PERMISSION_DENIED, name

    small_site.runner.run(scenario())


@pytest.mark.parametrize("case", ["no certificate", "other authority"])
def test_the_handshake_refuses_whoever_the_authority_does_not_know(
    small_site, admin_server, refusal, make_authority, case
):
    async def scenario():
        name = None if case == "no certificate" else "admin"
        stranger = make_authority("another authority")
        async with (
            admin_server.open(admin_server.deps(small_site.store)),
            admin_server.client(name, by=stranger) as client,
        ):
            refused = await refusal(client.forge.ListNvlinkNmxcEndpoints(Empty(), timeout=60))
            assert refused.code() is grpc.StatusCode.UNAVAILABLE

    small_site.runner.run(scenario())


def test_plaintext_is_not_answered(small_site, admin_server, refusal):
    async def scenario():
        async with (
            admin_server.open(admin_server.deps(small_site.store)),
            grpc.aio.insecure_channel(f"localhost:{admin_server.port}") as channel,
        ):
            call = channel.unary_unary("/forge.Forge/ListNvlinkNmxcEndpoints")
            refused = await refusal(call(b"", timeout=60))
            assert refused.code() is grpc.StatusCode.UNAVAILABLE

    small_site.runner.run(scenario())


def test_an_rpc_that_is_not_ours_is_unimplemented(small_site, admin_server, refusal):
    async def scenario():
        async with admin_server.open(admin_server.deps(small_site.store)), admin_server.client() as client:
            refused = await refusal(client.channel.unary_unary("/forge.Forge/FindExpectedMachines")(b""))
            assert refused.code() is grpc.StatusCode.UNIMPLEMENTED

    small_site.runner.run(scenario())


def test_a_defect_tells_nothing(small_site, admin_server, refusal):
    async def broken(*_):
        raise RuntimeError("the password is hunter2")

    async def scenario():
        deps = admin_server.deps(small_site.store, browse=broken)
        async with admin_server.open(deps), admin_server.client() as client:
            request = pb.NmxcBrowseRequest(chassis_serial="CHASSIS0", operation=3)
            refused = await refusal(client.forge.NmxcBrowse(request))
            assert refused.code() is grpc.StatusCode.INTERNAL
            assert "hunter2" not in refused.details()

    small_site.runner.run(scenario())
