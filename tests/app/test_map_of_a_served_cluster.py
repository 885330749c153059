"""The map of a served site with a cluster: it draws the cluster's state, or unknown without an answer."""

import asyncio
import json
import re
import ssl
from contextlib import asynccontextmanager
from functools import partial

import httpx2
import msgspec
import pytest
import yaml
from tests.app.test_serve import Operator, furnish
from tests.waiting import PATIENCE, until

from rackloom.app.config import load_config
from rackloom.app.demo.story import example_directory
from rackloom.app.listeners import serve_http
from rackloom.app.site.service import site_service
from rackloom.app.snapshot.assemble import site_snapshot
from rackloom.app.twin.cluster import twin_cluster
from rackloom.claim.kube.api import ObjectList
from rackloom.core.cluster.names import GPU_CLIQUE_LABEL, ORG_LABEL
from rackloom.core.cluster.objects import (
    COMPUTE_DOMAIN,
    GANG_PLAN,
    JOB,
    NAMESPACE,
    NODE,
    POD,
    RESOURCE_CLAIM_TEMPLATE,
)
from rackloom.core.cluster.projection import SNAPSHOT_KINDS, project_object
from rackloom.errors import Refused
from rackloom.lab.kube import refusals
from rackloom.lab.kube.direct import DirectApi
from rackloom.lab.kube.kubectl.serving import KubeApplication
from rackloom.lab.switches.fabric import SeededNames, SimulatedFabric
from rackloom.topology import profiles
from rackloom.topology.rack import RackProfile, RackSite, build_site

OURS = {"Sec-Fetch-Site": "same-origin"}
PROFILE = profiles.load_rack("gb200-nvl72")
TRAYS = 2


class Racks(msgspec.Struct):
    """The racks of `ground.racks`, as a cluster stands on them."""

    fabrics: tuple[SimulatedFabric, ...]
    site: RackSite = build_site(PROFILE, 1, SeededNames("lab"))
    profile: RackProfile = PROFILE
    seed: str = "lab"


class ApiServer:
    """A fake API server that comes and goes at one address."""

    def __init__(self, kube, folder):
        self._app = KubeApplication(kube, "secret", "rack-map")
        self._port = 0
        self.kubeconfig = folder / "kubeconfig"

    @asynccontextmanager
    async def up(self):
        async with serve_http(self._app, f"127.0.0.1:{self._port}") as self._port:
            self.kubeconfig.write_text(json.dumps(kubeconfig(f"http://127.0.0.1:{self._port}")))
            yield


def kubeconfig(url):
    return {
        "clusters": [{"name": "racks", "cluster": {"server": url}}],
        "users": [{"name": "map", "user": {"token": "secret"}}],
        "contexts": [{"name": "lab", "context": {"cluster": "racks", "user": "map"}}],
        "current-context": "lab",
    }


class Map:
    """The pages of a served site as a viewer sees them."""

    def __init__(self, ground, port, org, role):
        self._who = {"org": org, "token": ground.token(org, role)}
        tls = ssl.create_default_context(cafile=str(ground.ca))
        self._http = httpx2.AsyncClient(base_url=f"https://localhost:{port}", verify=tls, timeout=PATIENCE)

    async def __aenter__(self):
        answer = await self._http.post("/map/login", data=self._who, headers=OURS)
        assert answer.status_code == 303, answer.text
        return self

    async def __aexit__(self, *_):
        await self._http.aclose()

    async def page(self):
        return (await self._http.get("/?by=workload")).text

    async def says(self, words):
        """Wait until the page has these words."""

        async def found():
            page = await self.page()
            return page if re.search(words, page) else None

        return await until(found, f"the map says {words!r}")

    async def chains(self, label_part=""):
        """The chains through all layers, for each GPU with `label_part` in its label."""
        cells = re.findall(r'<rect id="(\w+)-(\d+)-(\d+)"[^>]*aria-label="([^"]*)"', await self.page())
        assert len(cells) == 72
        spots = ["/".join(spot) for *spot, label in cells if label_part in label]
        return [(await self._http.get(f"/map/gpu/{spot}")).text for spot in spots]

    async def shows_the_job(self):
        """Wait until the job is on all its GPUs. Their chains name its pods."""

        async def shown():
            chains = await self.chains("jobs/imex-minimal")
            return chains if len(chains) == 4 * TRAYS else None

        assert all("jobs/train-" in chain for chain in await until(shown, "the job is on the map"))

    async def no_longer_names_the_job(self):
        """The chains stop naming it at once. Findings have a time, and follow with the next examination."""
        assert "jobs/" not in "".join(await self.chains())

        async def unnamed():
            return "jobs/" not in await self.page()

        await until(unnamed, "no finding names the job")


async def tenant_has_trays(ground, site, org):
    """Two machines of the rack for a tenant, in a new partition."""
    async with (
        Operator(ground, site.admin_port) as admin,
        ground.rest(site.rest_port, role="PROVIDER_ADMIN") as http,
    ):
        kind = await furnish(http, await until(admin.machines, "the machines are found"))
    async with ground.rest(site.rest_port, org=org) as http:
        place = (await http.get("site")).json()[0]["id"]
        made = await http.post("nvlink-logical-partition", json={"name": "job", "siteId": place})
        body = {"name": "net", "siteId": place, "nvLinkLogicalPartitionId": made.json()["id"]}
        vpc = (await http.post("vpc", json=body)).json()["id"]
        batch = {"namePrefix": "job", "count": TRAYS, "vpcId": vpc, "instanceTypeId": kind}
        answer = await http.post("instance/batch", json={**batch, "topologyOptimized": True})
        assert answer.status_code == 201, answer.text

        async def all_ready():
            return {instance["status"] for instance in (await http.get("instance")).json()} == {"Ready"}

        await until(all_ready, "all are ready")


async def clique_of_trays(api):
    """The clique that the tenant's partition is: its nodes say so."""

    async def named():
        labels = [item["metadata"]["labels"].get(GPU_CLIQUE_LABEL) for item in (await api.list(NODE)).items]
        found = [label for label in labels if label]
        return found[0] if len(found) == TRAYS and len(set(found)) == 1 else None

    return await until(named, "the trays are a clique")


async def job_runs(cluster, org):
    """The minimal example on the tenant's trays, in a namespace that is labelled as the tenant's."""
    await cluster.nodes.settle()
    api = DirectApi(cluster.kube, "kubectl")
    await api.create(NAMESPACE, {"metadata": {"name": "jobs", "labels": {ORG_LABEL: org}}})
    domain, pod = yaml.safe_load_all((example_directory("imex-minimal") / "compute-domain.yaml").read_text())
    domain["metadata"]["namespace"] = "jobs"
    await api.create(COMPUTE_DOMAIN, domain)
    request = {"name": "gpu", "exactly": {"deviceClassName": "gpu.nvidia.com", "count": 4}}
    gpus = {
        "metadata": {"name": "gpus", "namespace": "jobs"},
        "spec": {"spec": {"devices": {"requests": [request]}}},
    }
    await api.create(RESOURCE_CLAIM_TEMPLATE, gpus)
    pod["spec"]["resourceClaims"].append({"name": "gpus", "resourceClaimTemplateName": "gpus"})
    pod["spec"]["nodeSelector"] = {GPU_CLIQUE_LABEL: await clique_of_trays(api)}
    template = {"metadata": {"labels": pod["metadata"]["labels"]}, "spec": pod["spec"]}
    spec = {"parallelism": TRAYS, "completions": TRAYS, "template": template}
    # A pod's start is given in whole seconds: it must not look as if it were before the tenant had the tray.
    await asyncio.sleep(1.0)
    await api.create(JOB, {"metadata": {"name": "train", "namespace": "jobs"}, "spec": spec})

    async def all_running():
        pods = (await api.list(POD, "jobs")).items
        return [pod["status"].get("phase") for pod in pods] == ["Running"] * TRAYS

    await until(all_running, "the job runs")


@asynccontextmanager
async def at_work(ground):
    """A served site with a tenant's job on its trays. Gives the API server of its cluster and the service."""
    async with (
        ground.racks() as (switch,),
        twin_cluster(Racks((switch.fabric,)), ground.directory / "cluster") as cluster,
    ):
        cluster.kube.bookmark_seconds = 0.2
        server = ApiServer(cluster.kube, ground.directory)
        async with server.up():
            pass
        config = load_config(ground.config(kubernetes=f'kubeconfig = "{server.kubeconfig}"\ncontext = "lab"'))
        async with site_service(config) as site:
            async with Operator(ground, site.admin_port) as admin:
                await admin.register(switch)
            yield site, cluster, server


@pytest.mark.slow
def test_what_a_cluster_says_is_drawn_while_it_says_it(ground):
    async def scenario():
        async with (
            at_work(ground) as (site, cluster, server),
            Map(ground, site.rest_port, "acme", "PROVIDER_VIEWER") as operator,
        ):
            page = await operator.says("cluster unknown since")
            assert "was not reached" in page, "nothing listens yet, and the site is served all the same"
            async with server.up():
                await operator.says("cluster <time")
                await tenant_has_trays(ground, site, "blue")
                await job_runs(cluster, "blue")
                await operator.shows_the_job()
                await shown_to_its_tenant_alone(ground, site)
                await a_glance_is_enough(cluster)
            await operator.says("cluster unknown since")
            await operator.no_longer_names_the_job()
            async with server.up():
                await operator.says("cluster <time")
                await operator.shows_the_job()

    asyncio.run(asyncio.wait_for(scenario(), 5 * PATIENCE))


async def shown_to_its_tenant_alone(ground, site):
    async with (
        Map(ground, site.rest_port, "blue", "TENANT_ADMIN") as own,
        Map(ground, site.rest_port, "green", "TENANT_ADMIN") as other,
    ):
        await own.shows_the_job()
        text = await other.page() + "".join(await other.chains())
        assert not re.search("jobs/|train|imex-minimal|blue", text)


class Seen(msgspec.Struct):
    """A cluster at one moment."""

    objects: dict

    async def list(self, kind):
        if kind not in self.objects:
            raise refusals.not_served()
        return ObjectList(tuple(self.objects[kind]), "")


async def a_glance_is_enough(cluster):
    """The kept parts of each object make the same picture as the whole objects."""
    api = DirectApi(cluster.kube, "kubectl")
    plan = {"metadata": {"name": "waits", "namespace": "jobs"}, "spec": {}}
    refused = {"type": "Placed", "status": "False", "reason": "DoesNotFit", "message": "no room"}
    await api.create(GANG_PLAN, plan)
    status = {"status": {"conditions": [refused]}}
    await api.patch(GANG_PLAN, "waits", "jobs", status, subresource="status")
    served = [kind for kind in SNAPSHOT_KINDS if kind in cluster.kube.schemas]
    whole = {kind: (await api.list(kind)).items for kind in served}
    kept = {
        kind: [projected for projected in map(partial(project_object, kind), objects) if projected]
        for kind, objects in whole.items()
    }
    assert all(whole.values()), "something of every kind is there"
    assert await site_snapshot(1.0, cluster=Seen(kept)) == await site_snapshot(1.0, cluster=Seen(whole))
    assert len(json.dumps(kept[NODE])) < len(json.dumps(whole[NODE])) / 2


def test_a_site_without_a_readable_kubeconfig_is_not_served(ground):
    def refusal(**tables):
        async def start():
            async with site_service(load_config(ground.config(**tables))):
                raise AssertionError("it is served")

        with pytest.raises(Refused) as caught:
            asyncio.run(start())
        assert caught.value.nearest_fix
        return caught.value.reason

    folder = ground.directory
    (folder / "broken").write_text("[]")
    (folder / "kubeconfig").write_text(json.dumps(kubeconfig("http://127.0.0.1:1")))
    assert "[kubernetes]: kubeconfig: " in refusal(kubernetes=f'kubeconfig = "{folder / "none"}"')
    assert "[kubernetes]: kubeconfig: " in refusal(kubernetes=f'kubeconfig = "{folder / "broken"}"')
    wrong = f'kubeconfig = "{folder / "kubeconfig"}"\ncontext = "other"'
    assert "Context 'other' not found" in refusal(kubernetes=wrong)
    assert "[kubernetes]: in_cluster: there is no service account" in refusal(kubernetes="in_cluster = true")
    assert "[map]: transfers: " in refusal(map=f'transfers = "{folder / "none"}"')
