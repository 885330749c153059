"""`rackloom uninstall`: a cluster by its kubeconfig, what is planned for it, and how far it came."""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TypeVar

import msgspec
import structlog

from rackloom.claim.cluster.settings import DEFAULT_NAMESPACE
from rackloom.claim.cluster.uninstall.plan import Plan, Step, plan
from rackloom.claim.cluster.uninstall.run import (
    Done,
    Limits,
    Outcome,
    Reader,
    Uninstallation,
    of_rights,
)
from rackloom.claim.kube.api import KubeError
from rackloom.claim.kube.connection import http_client
from rackloom.claim.kube.discovery import served
from rackloom.claim.kube.lightkube_api import LightkubeApi
from rackloom.claim.kube.pace import Pace
from rackloom.errors import Retry

AGENT = "rackloom-uninstall"
REQUESTS_PER_SECOND = 200.0
BURST = 400
"""One look asks for every type in every namespace of ours."""
AGAIN_SECONDS = 10.0
T = TypeVar("T")


class Target(msgspec.Struct, frozen=True, kw_only=True):
    """Which installation."""

    kubeconfig: Path | None = None
    """None: $KUBECONFIG, ~/.kube/config, or the service account of this pod."""
    context: str | None = None
    namespace: str = DEFAULT_NAMESPACE
    """Of the driver; ours even where it carries no label."""


class Watcher(msgspec.Struct, frozen=True):
    """Who hears how it goes on."""

    done: Callable[[Done], None]
    waiting: Callable[[Step, float], None]


def planned(target: Target) -> Plan:
    """What would be done. Raises Refused for a cluster that cannot be asked, Retry for one that is silent."""
    with _quiet():
        return asyncio.run(_with_cluster(target, _plan))


def carried_out(target: Target, still_seconds: float, watcher: Watcher) -> Outcome:
    """Do it, as far as nothing blocks it. Raises as `planned` does."""

    async def run(api: LightkubeApi, reader: Reader) -> Outcome:
        limits = Limits(still_seconds, time.monotonic, asyncio.sleep)
        return await Uninstallation(reader.look, api, limits, watcher.done, watcher.waiting).run()

    with _quiet():
        return asyncio.run(_with_cluster(target, run))


async def _plan(_: LightkubeApi, reader: Reader) -> Plan:
    return plan(await reader.look())


@contextmanager
def _quiet() -> Iterator[None]:
    """Writes are reported by the steps that they belong to: what is printed is for people, or is JSON."""
    before = structlog.get_config()
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.WARNING))
    try:
        yield
    finally:
        structlog.configure(**before)


async def _with_cluster(target: Target, work: Callable[[LightkubeApi, Reader], Awaitable[T]]) -> T:
    client = http_client(target.kubeconfig, target.context)
    client.headers["User-Agent"] = AGENT
    async with LightkubeApi(client, Pace(REQUESTS_PER_SECOND, BURST)) as api:
        try:
            types = await served(api)
            return await work(api, Reader(api, types, target.namespace, time.time))
        except KubeError as error:
            told = of_rights(error, "ask what is there")
            if told is error:
                raise Retry(error.message, after=AGAIN_SECONDS) from error
            raise told from error
