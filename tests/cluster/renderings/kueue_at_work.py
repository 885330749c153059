"""Kueue with the overlay deploy/kubernetes/kueue, and our controller with the rights that it brings."""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from pathlib import Path

from tests.cluster.control_plane import ControlPlane
from tests.cluster.installed import applied, as_account
from tests.cluster.renderings.build import KUEUE, QUEUES, source
from tests.cluster.renderings.operators import Operator, installed
from tests.waiting import until

from rackloom.app.controller import Leadership
from rackloom.claim.kube.api import KubeApi
from rackloom.core.cluster.objects import COMPUTE_DOMAIN, JOB, WORKLOAD, Object, ResourceKind
from rackloom.core.domains.settings import ControllerSettings
from rackloom.core.gangs.snapshot import GangSettings


@contextlib.asynccontextmanager
async def kueue_at_work(
    operators: Path, config: Object, cluster: ControlPlane, api: KubeApi, settings: ControllerSettings
) -> AsyncIterator[None]:
    """Both at work. Jobs, workloads and ComputeDomains are gone afterwards."""
    operator = Operator("kueue", operators / "kueue", source(QUEUES, KUEUE), config)
    async with (
        installed(operator, cluster, api),
        applied(cluster, api, "kueue"),
        as_account(api, cluster, "rackloom-controller") as own,
    ):
        gangs = GangSettings(again=2.0)
        leadership = Leadership(own, settings, "test", gang_settings=gangs, kueue_checks=True)
        task = asyncio.create_task(leadership.lead())
        yield
        assert not task.done(), task.exception()
        for job in (await api.list(JOB)).items:
            meta = job["metadata"]
            await api.delete(JOB, meta["name"], meta["namespace"], propagation="Background")
        for domain in (await api.list(COMPUTE_DOMAIN)).items:
            await api.delete(COMPUTE_DOMAIN, domain["metadata"]["name"], domain["metadata"]["namespace"])
        await until(lambda: _has_none(api, WORKLOAD), "the workloads are gone")
        await until(lambda: _has_none(api, COMPUTE_DOMAIN), "the ComputeDomains are taken apart")
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def _has_none(api: KubeApi, kind: ResourceKind) -> bool:
    return not (await api.list(kind)).items
