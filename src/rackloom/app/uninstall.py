"""`rackloom uninstall`: connects to the cluster of a kubeconfig, and plans or performs the removal.

`plan_removal` only reads. `perform_removal` performs the steps that nothing blocks, and reports each one
when another look at the cluster finds nothing more of it. A request that the API server forbids becomes a
refusal that names the missing right. A cluster that does not answer becomes `Retry`. Log events of single
writes are silenced during the removal: the output is for people, or is JSON.
"""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TypeVar

import msgspec
import structlog

from rackloom.claim.cluster.uninstall.executor import (
    FinishedStep,
    InventoryReader,
    Uninstallation,
    UninstallLimits,
    UninstallOutcome,
    access_error,
    discover_types,
)
from rackloom.claim.cluster.uninstall.plan import UninstallPlan, UninstallStep, build_uninstall_plan
from rackloom.claim.kube.api import KubeError
from rackloom.claim.kube.client import KubeClient, RateLimiter
from rackloom.claim.kube.connection import http_client
from rackloom.core.domains.settings import DEFAULT_NAMESPACE
from rackloom.errors import Retry
from rackloom.runtime.log_settings import structlog_configured

AGENT = "rackloom-uninstall"
REQUESTS_PER_SECOND = 200.0
BURST = 400
"""One look lists every type in every namespace of Rackloom."""
RETRY_SECONDS = 10.0
T = TypeVar("T")


class UninstallTarget(msgspec.Struct, frozen=True, kw_only=True):
    """The installation to remove."""

    kubeconfig: Path | None = None
    """None stands for $KUBECONFIG, ~/.kube/config, or the service account of this pod."""
    context: str | None = None
    namespace: str = DEFAULT_NAMESPACE
    """The namespace of the driver. It belongs to Rackloom even if it carries no label."""
    helm_release: str | None = None
    """The Helm release by which it was installed. Objects of other releases stay."""


class ProgressListener(msgspec.Struct, frozen=True):
    """Callbacks for progress."""

    done: Callable[[FinishedStep], None]
    waiting: Callable[[UninstallStep, float], None]


def plan_removal(target: UninstallTarget) -> UninstallPlan:
    """The planned steps. Raises Refused if requests are forbidden, and Retry without an answer."""
    with _quiet():
        return asyncio.run(_with_cluster(target, _plan))


def perform_removal(
    target: UninstallTarget, still_seconds: float, watcher: ProgressListener
) -> UninstallOutcome:
    """Do it, as far as nothing blocks it. Raises as `plan_removal` does."""

    async def run(api: KubeClient, reader: InventoryReader) -> UninstallOutcome:
        limits = UninstallLimits(still_seconds, time.monotonic, asyncio.sleep)
        return await Uninstallation(reader.read, api, limits, watcher.done, watcher.waiting).run()

    with _quiet():
        return asyncio.run(_with_cluster(target, run))


async def _plan(_: KubeClient, reader: InventoryReader) -> UninstallPlan:
    return build_uninstall_plan(await reader.read())


def _quiet() -> AbstractContextManager[None]:
    """Writes are reported by the steps that they belong to: what is printed is for people, or is JSON."""
    return structlog_configured(wrapper_class=structlog.make_filtering_bound_logger(logging.WARNING))


async def _with_cluster(
    target: UninstallTarget, work: Callable[[KubeClient, InventoryReader], Awaitable[T]]
) -> T:
    client = http_client(target.kubeconfig, target.context)
    client.headers["User-Agent"] = AGENT
    async with KubeClient(client, RateLimiter(REQUESTS_PER_SECOND, BURST)) as api:
        try:
            types = await discover_types(api)
            reader = InventoryReader(api, types, target.namespace, time.time, target.helm_release)
            return await work(api, reader)
        except KubeError as error:
            refusal = access_error(error, "ask what is there")
            if refusal is error:
                raise Retry(error.message, after=RETRY_SECONDS) from error
            raise refusal from error
