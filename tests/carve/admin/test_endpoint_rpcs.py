"""RPCs about switch controllers and their passwords, through a real server."""

import pytest
from google.protobuf.empty_pb2 import Empty
from tests.carve.admin.admin_site import Code

from rackloom.carve.admin import forge_pb2 as pb


def test_endpoints(run_on_site):
    async def scenario(admin):
        new = pb.NvlinkNmxcEndpoint(chassis_serial="S1", endpoint="https://one:9370")
        moved = pb.NvlinkNmxcEndpoint(chassis_serial="S1", endpoint="https://two")
        assert await admin.forge.CreateNvlinkNmxcEndpoint(new) == new
        assert (await admin.refused(admin.forge.CreateNvlinkNmxcEndpoint(moved)))[0] is Code.ALREADY_EXISTS
        assert await admin.forge.UpdateNvlinkNmxcEndpoint(moved) == moved
        listed = (await admin.forge.ListNvlinkNmxcEndpoints(Empty())).entries
        assert [endpoint.chassis_serial for endpoint in listed] == ["CHASSIS0", "CHASSIS1", "S1"]
        assert listed[2] == moved
        await admin.forge.DeleteNvlinkNmxcEndpoint(pb.DeleteNvlinkNmxcEndpointRequest(chassis_serial="S1"))
        assert len((await admin.forge.ListNvlinkNmxcEndpoints(Empty())).entries) == 2
        assert admin.server.refreshed == 3
        for call in (
            admin.forge.UpdateNvlinkNmxcEndpoint(moved),
            admin.forge.DeleteNvlinkNmxcEndpoint(pb.DeleteNvlinkNmxcEndpointRequest(chassis_serial="S1")),
        ):
            assert (await admin.refused(call))[0] is Code.NOT_FOUND

    run_on_site(scenario)


@pytest.mark.parametrize(
    ("serial", "url"), [("", "https://one"), (" ", "https://one"), ("S1", ""), ("S1", "one:9370")]
)
def test_an_endpoint_needs_a_serial_and_a_url(run_on_site, serial, url):
    async def scenario(admin):
        request = pb.NvlinkNmxcEndpoint(chassis_serial=serial, endpoint=url)
        assert (await admin.refused(admin.forge.CreateNvlinkNmxcEndpoint(request)))[
            0
        ] is Code.INVALID_ARGUMENT
        assert admin.server.refreshed == 0

    run_on_site(scenario)


def test_credentials_are_kept_and_only_those_of_nmx_m(run_on_site):
    async def scenario(admin):
        create = pb.CredentialCreationRequest(credential_type=pb.NmxM, username="root", password="hush")
        await admin.forge.CreateCredential(create)
        assert admin.server.credentials.fields == {
            "nmxm/default/auth": {"username": "root", "password": "hush"}
        }
        await admin.forge.DeleteCredential(pb.CredentialDeletionRequest(credential_type=pb.NmxM))
        assert admin.server.credentials.fields == {}
        for wrong in (
            pb.CredentialCreationRequest(credential_type=pb.UFM, username="root", password="hush"),
            pb.CredentialCreationRequest(credential_type=pb.NmxM, password="hush"),
        ):
            assert (await admin.refused(admin.forge.CreateCredential(wrong)))[0] is Code.INVALID_ARGUMENT

    run_on_site(scenario)
