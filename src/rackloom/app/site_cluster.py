"""The way to the cluster on a site's racks, as `[kubernetes]` of the configuration names it."""

import os
import random
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

from rackloom.app.cluster_follower import ClusterFollower
from rackloom.app.config_sections import ClusterConfig
from rackloom.app.picture.glance import glance
from rackloom.claim.kube.lightkube_api import LightkubeApi, connect
from rackloom.errors import Refused

SERVICE_ACCOUNT = Path("/var/run/secrets/kubernetes.io/serviceaccount")
"""Where Kubernetes mounts it."""


def connected(config: ClusterConfig, user_agent: str) -> LightkubeApi:
    """A client, which gives of each object what a picture is made of; nothing is asked of the server yet.

    Raises Refused when the configuration names no API server.
    """
    if config.in_cluster:
        _check_account(SERVICE_ACCOUNT)
    try:
        return connect(config.kubeconfig, config.context, user_agent=user_agent, keep=glance)
    except Refused as error:
        raise Refused(
            f"[kubernetes]: {'in_cluster' if config.in_cluster else 'kubeconfig'}: {error.reason}",
            nearest_fix="name a kubeconfig that can be read, and a context of it",
        ) from error


def _check_account(folder: Path) -> None:
    # Without this, a kubeconfig that lies around would do for the pod's account.
    if "KUBERNETES_SERVICE_HOST" not in os.environ or not (folder / "token").is_file():
        raise Refused(
            f"[kubernetes]: in_cluster: there is no service account in {folder}",
            nearest_fix="set automountServiceAccountToken: true in the pod, or name a kubeconfig",
        )


@asynccontextmanager
async def site_cluster(config: ClusterConfig, clock: Callable[[], float]) -> AsyncIterator[ClusterFollower]:
    """Who follows the cluster, connected while the context is entered; `clock` gives seconds since the epoch.

    Raises Refused when the configuration names no API server. One that does not answer is waited for.
    """
    async with connected(config, "rackloom-map") as api:
        yield ClusterFollower(api, clock, random.Random())  # noqa: S311 (jitter)
