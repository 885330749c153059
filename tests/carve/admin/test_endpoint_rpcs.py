"""RPCs about switch controllers and their passwords, through the real door."""

import pytest
from google.protobuf.empty_pb2 import Empty
from tests.carve.admin.stage import Code

from rackloom.carve.admin import forge_pb2 as pb


def test_endpoints(on_stage):
    async def scenario(stage):
        new = pb.NvlinkNmxcEndpoint(chassis_serial="S1", endpoint="https://one:9370")
        moved = pb.NvlinkNmxcEndpoint(chassis_serial="S1", endpoint="https://two")
        assert await stage.forge.CreateNvlinkNmxcEndpoint(new) == new
        assert (await stage.refused(stage.forge.CreateNvlinkNmxcEndpoint(moved)))[0] is Code.ALREADY_EXISTS
        assert await stage.forge.UpdateNvlinkNmxcEndpoint(moved) == moved
        listed = (await stage.forge.ListNvlinkNmxcEndpoints(Empty())).entries
        assert [endpoint.chassis_serial for endpoint in listed] == ["CHASSIS0", "CHASSIS1", "S1"]
        assert listed[2] == moved
        await stage.forge.DeleteNvlinkNmxcEndpoint(pb.DeleteNvlinkNmxcEndpointRequest(chassis_serial="S1"))
        assert len((await stage.forge.ListNvlinkNmxcEndpoints(Empty())).entries) == 2
        assert stage.door.refreshed == 3
        for call in (
            stage.forge.UpdateNvlinkNmxcEndpoint(moved),
            stage.forge.DeleteNvlinkNmxcEndpoint(pb.DeleteNvlinkNmxcEndpointRequest(chassis_serial="S1")),
        ):
            assert (await stage.refused(call))[0] is Code.NOT_FOUND

    on_stage(scenario)


@pytest.mark.parametrize(
    ("serial", "url"), [("", "https://one"), (" ", "https://one"), ("S1", ""), ("S1", "one:9370")]
)
def test_an_endpoint_needs_a_serial_and_a_url(on_stage, serial, url):
    async def scenario(stage):
        request = pb.NvlinkNmxcEndpoint(chassis_serial=serial, endpoint=url)
        assert (await stage.refused(stage.forge.CreateNvlinkNmxcEndpoint(request)))[
            0
        ] is Code.INVALID_ARGUMENT
        assert stage.door.refreshed == 0

    on_stage(scenario)


def test_credentials_are_kept_and_only_those_of_nmx_m(on_stage):
    async def scenario(stage):
        create = pb.CredentialCreationRequest(credential_type=pb.NmxM, username="root", password="hush")
        await stage.forge.CreateCredential(create)
        assert stage.door.kept.fields == {"nmxm/default/auth": {"username": "root", "password": "hush"}}
        await stage.forge.DeleteCredential(pb.CredentialDeletionRequest(credential_type=pb.NmxM))
        assert stage.door.kept.fields == {}
        for wrong in (
            pb.CredentialCreationRequest(credential_type=pb.UFM, username="root", password="hush"),
            pb.CredentialCreationRequest(credential_type=pb.NmxM, password="hush"),
        ):
            assert (await stage.refused(stage.forge.CreateCredential(wrong)))[0] is Code.INVALID_ARGUMENT

    on_stage(scenario)
