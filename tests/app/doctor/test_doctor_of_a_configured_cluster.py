"""With a site's configuration the doctor reads the cluster and the transfers that it names."""

import asyncio
import time

import pytest
from tests.app.test_map_of_a_served_cluster import ApiServer

from rackloom.app.config import load
from rackloom.app.doctor import Sources, look
from rackloom.app.serve import service
from rackloom.claim.kube.kinds import NODE
from rackloom.errors import Refused
from rackloom.prove.picture.values import Layer
from rackloom.twin.kube import DirectApi, FakeKube


async def nodes_seen(sources):
    """The names of the nodes, and the layers that were read."""
    picture = await look(sources, time.time())
    read = {one.layer for one in picture.layers if one.unknown_since is None}
    return [one.name for one in picture.nodes], read


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
            async with service(load(path)):
                pass
            nodes, read = await nodes_seen(Sources(config=path))
            assert (nodes, {Layer.CLUSTER, Layer.TRANSFER} <= read) == (["configured"], True)
            nodes, _ = await nodes_seen(Sources(config=path, kubeconfig=named.kubeconfig))
            assert nodes == ["named"]
        nodes, read = await nodes_seen(Sources(config=path))
        assert (nodes, Layer.CLUSTER in read, Layer.SITE in read) == ([], False, True)

    asyncio.run(scenario())


def test_outside_of_a_pod_there_is_no_cluster_that_it_is_in(ground):
    async def scenario():
        path = ground.config(kubernetes="in_cluster = true")
        with pytest.raises(Refused, match="in_cluster: there is no service account"):
            await look(Sources(config=path), time.time())

    (ground.directory / "home").mkdir()
    (ground.directory / "home" / "site.db").touch()
    asyncio.run(scenario())
