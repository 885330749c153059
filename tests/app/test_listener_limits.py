"""Strangers at every listener: it still answers others, and accepts no more than its limits."""

import asyncio
import ssl

import grpc
import grpc.aio
import httpx2
import pytest
import uvloop
from tests.app.test_serve import Operator
from tests.attacks import answers_others_in_a_crowd, cuts_endless_heads, grpc_is_bounded, http_is_bounded
from tests.claim.cluster.admission.test_over_tls import issued, trusted
from tests.lab.switches.nmxm_server import NmxmServer

from rackloom.app.config import load_config
from rackloom.app.controller import ControllerEndpoints, Leadership
from rackloom.app.listeners import serve_http
from rackloom.app.site.service import site_service
from rackloom.app.twin.up import served_api
from rackloom.app.webhook import WebhookOptions, webhook
from rackloom.carve.admin import forge_pb2 as pb
from rackloom.claim.cluster.admission.webhook import AdmissionSettings
from rackloom.claim.kube.connection import http_client
from rackloom.core.domains.settings import ControllerSettings, ImexDaemonSettings
from rackloom.lab.kube.direct import DirectApi
from rackloom.lab.kube.server import FakeKube
from rackloom.lab.switches.fabric import SeededNames, fabrics_of
from rackloom.lab.switches.servers import NmxcServer
from rackloom.serving.limits import (
    PROBES,
    SIMULATED_API_SERVER,
    SIMULATED_NMX_C,
    SIMULATED_NMX_M,
    SITE_ADMIN,
    SITE_REST,
    WEBHOOK,
)
from rackloom.topology import profiles
from rackloom.topology.rack import build_site


def counted(page, listener, why):
    series = f'nico_nvlink_connections_ended_total{{listener="{listener}",why="{why}"}}'
    return next(float(line.split()[-1]) for line in page.splitlines() if line.startswith(series))


@pytest.mark.slow
def test_the_listeners_of_a_site(ground):
    async def scenario():
        async with site_service(load_config(ground.config())) as site:
            tls = ssl.create_default_context(cafile=str(ground.ca))
            await http_is_bounded(site.rest_port, SITE_REST, "/openapi.json", tls)
            await http_is_bounded(site.metrics_port, PROBES, "/metrics")
            async with httpx2.AsyncClient() as http:
                page = (await http.get(f"http://localhost:{site.metrics_port}/metrics")).text
            # A crowd that comes slowly, on a busy machine, displaces its own oldest connections.
            assert counted(page, "rest", "full") + counted(page, "rest", "evicted") > 0
            assert counted(page, "admin", "full") == 0

            async def ask():
                async with Operator(ground, site.admin_port) as admin:
                    return await admin.forge.Version(pb.VersionRequest())

            await answers_others_in_a_crowd(site.admin_port, SITE_ADMIN, ask)

    asyncio.run(scenario())


def test_an_operator_cannot_send_endless_metadata(ground):
    async def scenario():
        async with (
            site_service(load_config(ground.config())) as site,
            Operator(ground, site.admin_port) as admin,
        ):
            with pytest.raises(grpc.aio.AioRpcError) as refused:
                await admin.forge.Version(pb.VersionRequest(), metadata=(("x", "y" * 100_000),))
            assert refused.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
            assert await admin.forge.Version(pb.VersionRequest())

    asyncio.run(scenario())


def test_the_simulated_api_server(tmp_path):
    async def scenario():
        kubeconfig = tmp_path / "kubeconfig"
        async with served_api(FakeKube(), "admin", kubeconfig) as url:
            port = httpx2.URL(url).port

            async def ask():
                async with http_client(kubeconfig, None) as http:
                    return (await http.get("/api/v1/nodes")).status_code == 200

            await cuts_endless_heads(port, tls=True)
            await answers_others_in_a_crowd(port, SIMULATED_API_SERVER, ask)

    asyncio.run(scenario())


def test_the_webhook():
    async def scenario():
        api = await issued()
        options = WebhookOptions(identity="w", listen="127.0.0.1:0")
        async with webhook(api, AdmissionSettings(), options) as port:
            tls = ssl.create_default_context(cadata=await trusted(api))
            await http_is_bounded(port, WEBHOOK, "/metrics", tls)

    asyncio.run(scenario())


def test_the_probes_of_the_controller():
    settings = ControllerSettings(daemon=ImexDaemonSettings(image="image:1"))
    leadership = Leadership(DirectApi(FakeKube(), "controller"), settings, "one")

    async def scenario():
        async with serve_http(ControllerEndpoints(leadership), "127.0.0.1:0", limits=PROBES) as port:
            await http_is_bounded(port, PROBES, "/healthz")

    asyncio.run(scenario())


@pytest.fixture
def fabric():
    site = build_site(profiles.load_rack("gb200-nvl72"), 1, SeededNames("lab"))
    return fabrics_of(site, "lab")[0]


@pytest.mark.parametrize("run", [asyncio.run, uvloop.run], ids=["asyncio", "uvloop"])
def test_a_simulated_nmx_c(fabric, run):
    async def scenario():
        async with NmxcServer(fabric) as server:
            port = int(server.url.rsplit(":", 1)[1])

            async def ask():
                options = (("grpc.use_local_subchannel_pool", 1),)
                async with grpc.aio.insecure_channel(f"127.0.0.1:{port}", options=options) as channel:
                    with pytest.raises(grpc.aio.AioRpcError) as answer:
                        await channel.unary_unary("/no/such")(b"")
                    return answer.value.code() is grpc.StatusCode.UNIMPLEMENTED

            await grpc_is_bounded(port, SIMULATED_NMX_C, ask)

    run(scenario())


def test_a_simulated_nmx_m(fabric):
    async def scenario():
        async with NmxmServer([fabric]) as server:
            await http_is_bounded(httpx2.URL(server.origin).port, SIMULATED_NMX_M)

    asyncio.run(scenario())
