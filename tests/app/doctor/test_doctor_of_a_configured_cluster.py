"""With a site's configuration the doctor reads the cluster and the transfers that it names."""

import asyncio
import time

import pytest
from tests.app.test_map_of_a_served_cluster import ApiServer

from rackloom.app.config import load_config
from rackloom.app.doctor import DoctorSources, read_snapshot
from rackloom.app.site.service import site_service
from rackloom.core.cluster.names import COMPUTE_DOMAIN_LABEL, DAEMON_CONTAINER
from rackloom.core.cluster.objects import NAMESPACE, NODE, POD
from rackloom.core.diagnosis.snapshot import Layer
from rackloom.errors import Refused
from rackloom.lab.kube.direct import DirectApi
from rackloom.lab.kube.server import FakeKube


async def nodes_seen(sources):
    """The names of the nodes, and the layers that were read."""
    snapshot = await read_snapshot(sources, time.time())
    read = {layer.layer for layer in snapshot.layers if layer.unknown_since is None}
    return [node.name for node in snapshot.nodes], read


@pytest.mark.slow
def test_the_configured_cluster_is_examined_unless_another_is_named(ground):
    (ground.directory / "other").mkdir()
    (ground.directory / "transfers").mkdir()

    async def scenario():
        kube, other = FakeKube(seed=1), FakeKube(seed=2)
        await DirectApi(kube, "admin").create(NODE, {"metadata": {"name": "configured"}})
        await DirectApi(other, "admin").create(NODE, {"metadata": {"name": "named"}})
        mine, named = ApiServer(kube, ground.directory), ApiServer(other, ground.directory / "other")
        async with mine.up(), named.up():
            path = ground.config(
                kubernetes=f'kubeconfig = "{mine.kubeconfig}"',
                map=f'transfers = "{ground.directory / "transfers"}"',
            )
            async with site_service(load_config(path)):
                pass
            nodes, read = await nodes_seen(DoctorSources(config=path))
            assert (nodes, {Layer.CLUSTER, Layer.TRANSFER} <= read) == (["configured"], True)
            nodes, _ = await nodes_seen(DoctorSources(config=path, kubeconfig=named.kubeconfig))
            assert nodes == ["named"]
        nodes, read = await nodes_seen(DoctorSources(config=path))
        assert (nodes, Layer.CLUSTER in read, Layer.SITE in read) == ([], False, True)

    asyncio.run(scenario())


@pytest.mark.slow
@pytest.mark.parametrize(
    ("configured", "problem"),
    [
        ("in_cluster = true", "in_cluster: there is no service account"),
        ('kubeconfig = "/nowhere/kubeconfig"', "kubeconfig: no API server from /nowhere/kubeconfig"),
    ],
)
def test_a_cluster_that_is_not_reached_from_this_machine_is_unknown_and_all_else_is_read(
    ground, configured, problem
):
    async def scenario():
        async with site_service(load_config(ground.config())):
            pass
        path = ground.config(kubernetes=configured)
        snapshot = await read_snapshot(DoctorSources(config=path), time.time())
        lost = snapshot.layer(Layer.CLUSTER)
        assert lost.unknown_since == snapshot.at
        assert problem in lost.problem
        assert f"--config {path} --kubeconfig" in lost.fix
        assert snapshot.layer(Layer.SITE).unknown_since is None
        with pytest.raises(Refused, match="no API server from"):
            await read_snapshot(DoctorSources(config=path, kubeconfig=ground.directory / "none"), time.time())

    asyncio.run(scenario())


def test_a_database_that_is_not_there_is_the_configurations_to_name(ground):
    config = ground.config()
    with pytest.raises(Refused, match=r"which \[database\] of .* names") as refused:
        asyncio.run(read_snapshot(DoctorSources(config=config), time.time()))
    assert "--home" not in refused.value.nearest_fix
    assert f"rackloom serve --config {config}" in refused.value.nearest_fix


@pytest.mark.slow
def test_imex_daemons_are_looked_for_where_the_configuration_says(ground):
    async def scenario():
        kube = FakeKube(seed=1)
        labels = {COMPUTE_DOMAIN_LABEL: "some-domain"}
        spec = {"containers": [{"name": DAEMON_CONTAINER}], "nodeName": "tray-1"}
        meta = {"name": "daemon", "namespace": "imex", "labels": labels}
        await DirectApi(kube, "admin").create(NAMESPACE, {"metadata": {"name": "imex"}})
        await DirectApi(kube, "admin").create(POD, {"metadata": meta, "spec": spec})
        server = ApiServer(kube, ground.directory)

        async def meshes(text="", **named):
            path = ground.config(kubernetes=f'kubeconfig = "{server.kubeconfig}"\n{text}')
            async with site_service(load_config(path)):
                pass
            snapshot = await read_snapshot(DoctorSources(config=path, **named), time.time())
            return [mesh.node for mesh in snapshot.meshes]

        async with server.up():
            assert await meshes() == []
            assert await meshes('namespace = "imex"') == ["tray-1"]
            assert await meshes('namespace = "imex"', namespace="rackloom-system") == []
            with pytest.raises(Refused, match="no namespace rackloom-sytem"):
                await meshes(namespace="rackloom-sytem")

    asyncio.run(scenario())
