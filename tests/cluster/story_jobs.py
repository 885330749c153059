"""Small jobs for the whole story, and the programs that may die under them."""

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Mapping

from tests.cluster.story import Site
from tests.cluster.story_programs import DAEMON_ACCOUNT, pods_of
from tests.waiting import until

from rackloom.claim.kube.api import KubeError, NotFound
from rackloom.core.cluster import names
from rackloom.core.cluster.objects import COMPUTE_DOMAIN, EVENT, NODE, POD, RESOURCE_CLAIM_TEMPLATE, Object

NOT_PREPARED = "FailedPrepareDynamicResources"


def domain(namespace: str, name: str) -> Object:
    """A ComputeDomain with a template that is called `channel-<name>`."""
    spec = {"channel": {"resourceClaimTemplate": {"name": f"channel-{name}"}}}
    return {"metadata": {"name": name, "namespace": namespace}, "spec": spec}


def worker(namespace: str, job: str, number: int) -> Object:
    """A pod with a channel, beside the others of its job."""
    beside = {"topologyKey": names.GPU_CLIQUE_LABEL, "labelSelector": {"matchLabels": {"job": job}}}
    return {
        "metadata": {"name": f"{job}-{number}", "namespace": namespace, "labels": {"job": job}},
        "spec": {
            "affinity": {"podAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": [beside]}},
            "containers": [{"name": "main", "image": "none", "resources": {"claims": [{"name": "channel"}]}}],
            "resourceClaims": [{"name": "channel", "resourceClaimTemplateName": f"channel-{job}"}],
        },
    }


def template(namespace: str, name: str, **parameters: object) -> Object:
    """A claim template that a user wrote by hand, for a channel with these parameters."""
    config = {"apiVersion": names.API_VERSION, "kind": "ComputeDomainChannelConfig", **parameters}
    opaque = {"driver": names.IMEX_DRIVER, "parameters": config}
    request = {"name": "channel", "exactly": {"deviceClassName": names.CHANNEL_CLASS}}
    devices = {"requests": [request], "config": [{"requests": ["channel"], "opaque": opaque}]}
    return {
        "metadata": {"name": name, "namespace": namespace},
        "spec": {"spec": {"devices": devices}},
    }


async def start(site: Site, namespace: str, job: str, workers: int) -> str:
    """Create a ComputeDomain and its pods. Returns its UID."""
    made = await site.api.create(COMPUTE_DOMAIN, domain(namespace, job))
    for number in range(workers):
        await site.api.create(POD, worker(namespace, job, number))
    return str(made["metadata"]["uid"])


async def end(site: Site, namespace: str, job: str, workers: int) -> None:
    """Delete all of it at once."""
    for number in range(workers):
        await site.api.delete(POD, f"{job}-{number}", namespace)
    await site.api.delete(COMPUTE_DOMAIN, job, namespace)


async def prepare_event(site: Site, namespace: str, pod: str, text: str) -> Object:
    """The event by which a pod's user learns why its claims are not prepared."""

    async def look() -> Object | None:
        found = (await site.api.list(EVENT, namespace, fields=f"reason={NOT_PREPARED}")).items
        mine = [
            event for event in found if event["involvedObject"]["name"] == pod and text in event["message"]
        ]
        return mine[0] if mine else None

    event = await until(look, f"{pod} is told: {text}")
    assert event is not None
    return event


async def hand_made(site: Site, namespace: str, name: str, **parameters: object) -> None:
    """A pod with a template that a user wrote by hand."""
    made = template(namespace, f"channel-{name}", **parameters)
    await site.api.create(RESOURCE_CLAIM_TEMPLATE, made)
    await site.api.create(POD, worker(namespace, name, 0))


async def _kill(site: Site, pods: list[Object]) -> None:
    """Kill pods without a grace period. A pod that is gone already has been replaced."""
    for pod in pods:
        with contextlib.suppress(NotFound):
            await site.api.delete(POD, pod["metadata"]["name"], pod["metadata"]["namespace"], grace_seconds=0)


async def _controllers(site: Site) -> None:
    await _kill(site, await pods_of(site.api, "rackloom-controller"))


async def _plugins(site: Site) -> None:
    await _kill(site, await pods_of(site.api, "rackloom-node-imex"))


async def _daemon(site: Site) -> None:
    await _kill(site, (await pods_of(site.api, DAEMON_ACCOUNT))[:1])


async def _imex(site: Site) -> None:
    for pod in list(site.programs.children)[:1]:
        site.programs.kill_imex(pod)


async def _api_server(site: Site) -> None:
    await asyncio.to_thread(site.cluster.kill_one, "kube-apiserver")
    await asyncio.sleep(2.0)
    site.cluster.start_one("kube-apiserver")
    await asyncio.to_thread(site.cluster.wait_until_ready)

    async def answers() -> bool:
        try:
            return bool((await site.api.list(NODE)).items)
        except KubeError:
            return False

    await until(answers, "the API server answers")


async def _node(site: Site) -> None:
    node = next(iter(site.trays))
    await site.nodes.lose(node)
    site.trays[node].boot(2)
    await asyncio.sleep(2.0)
    await site.register(node)


DEATHS: Mapping[str, Callable[[Site], Awaitable[None]]] = {
    "controller": _controllers,
    "plugin": _plugins,
    "daemon": _daemon,
    "imex": _imex,
    "api-server": _api_server,
    "node": _node,
}
"""Parts that die without a warning, and that their usual supervisor starts again."""
