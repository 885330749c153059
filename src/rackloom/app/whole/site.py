"""The whole twin: site service, switches, cluster and nodes, in one process on loopback."""

from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from pathlib import Path

import msgspec

from rackloom.app.embedded import Embedded, embedded_site
from rackloom.app.home import Home
from rackloom.app.whole.cluster import Cluster, twin_cluster
from rackloom.app.whole.kubeconfig import served
from rackloom.claim.kube.api import Kind, KubeApi, Object
from rackloom.claim.kube.kinds import LEASE
from rackloom.twin.kube import DirectApi, FakeKube, ReadingApi
from rackloom.twin.nodes.kubelets import Kubelets
from rackloom.twin.nodes.trays import Nodes
from rackloom.twin.switches.fabric import SimulatedFabric

USER = "admin"


class Whole(msgspec.Struct, frozen=True, kw_only=True):
    """A running twin."""

    site: Embedded
    cluster: Cluster
    api: KubeApi
    """The API server as a user asks it."""
    kubeconfig: Path

    @property
    def kube(self) -> FakeKube:
        """The API server itself, with its faults."""
        return self.cluster.kube

    @property
    def nodes(self) -> Nodes:
        """The trays as nodes."""
        return self.cluster.nodes

    @property
    def kubelets(self) -> Kubelets:
        """What runs their pods."""
        return self.cluster.nodes.kubelets

    @property
    def fabrics(self) -> Mapping[str, SimulatedFabric]:
        """What the switches have, by domain."""
        return {domain: server.fabric for domain, server in self.site.twin.servers.items()}


@asynccontextmanager
async def whole_site(home: Home, *, port: int, racks: int, profile: str) -> AsyncIterator[Whole]:
    """A twin that answers while the context is entered. Its nodes appear one after the other from then on.

    `nodes.up` is set once all are there. The site is what `home` remembers; the cluster starts empty.
    """
    kubeconfig = home.path / "kubeconfig"
    async with (
        embedded_site(home, port=port, racks=racks, profile=profile) as site,
        twin_cluster(site.twin, home.twin / "cluster") as cluster,
        served(cluster.kube, USER, kubeconfig),
    ):
        site.source.cluster = ReadingApi(cluster.kube, "rack-map")
        site.source.cluster_version = _changes_of(cluster.kube)
        yield Whole(site=site, cluster=cluster, api=DirectApi(cluster.kube, USER), kubeconfig=kubeconfig)


def _changes_of(kube: FakeKube) -> Callable[[], int]:
    """Counts what changes in a cluster, without the heartbeats of its nodes: they change no picture."""
    seen = 0

    def hear(kind: Kind, _: Object) -> None:
        nonlocal seen
        seen += kind != LEASE

    kube.store.listeners.append(hear)
    return lambda: seen
