"""The clique label: ours until another program writes it, and only ours to remove."""

import asyncio

from rackloom.claim.node.imex.labels import CliqueLabel
from rackloom.core.cluster.names import GPU_CLIQUE_LABEL
from rackloom.core.cluster.objects import NODE
from rackloom.lab.kube.direct import DirectApi
from rackloom.lab.virtual.event_loop import run_simulation


async def value(imex):
    node = await imex.api.get(NODE, imex.kit.node)
    return node["metadata"].get("labels", {}).get(GPU_CLIQUE_LABEL)


async def discovery_writes(imex, clique):
    """GPU Feature Discovery's label, as node-feature-discovery's master writes it."""
    master = DirectApi(imex.kit.kube, "nfd-master")
    await master.patch(NODE, imex.kit.node, None, {"metadata": {"labels": {GPU_CLIQUE_LABEL: clique}}})


def test_it_is_written_kept_up_to_date_and_taken_away(imex):
    async def story():
        await imex.kit.boot()
        view = imex.view()
        label = CliqueLabel(imex.api, imex.kit.node, view)
        await label.write()
        assert await value(imex) == imex.clique
        imex.declare(clusterUUID=imex.cluster, cliqueId=2, gpus=[{}])
        await view.observe()
        await label.write()
        assert await value(imex) == f"{imex.cluster}.2"
        await label.withdraw()
        assert await value(imex) is None

    asyncio.run(story())


def test_a_label_of_gpu_feature_discovery_is_left_alone(imex):
    async def story():
        await imex.kit.boot()
        await discovery_writes(imex, "theirs.1")
        label = CliqueLabel(imex.api, imex.kit.node, imex.view())
        await label.write()
        assert label.second_writer == "nfd-master"
        await label.withdraw()
        assert await value(imex) == "theirs.1"

    asyncio.run(story())


def test_a_second_writer_takes_over_for_good(imex):
    async def story():
        await imex.kit.boot()
        label = CliqueLabel(imex.api, imex.kit.node, imex.view())
        await label.write()
        await discovery_writes(imex, "theirs.1")
        await label.write()
        assert label.second_writer == "nfd-master"
        await label.withdraw()
        assert await value(imex) == "theirs.1"

    asyncio.run(story())


def test_a_second_writer_that_agrees_keeps_the_label_when_we_go(imex):
    async def story():
        await imex.kit.boot()
        label = CliqueLabel(imex.api, imex.kit.node, imex.view())
        await label.write()
        await discovery_writes(imex, imex.clique)
        master = DirectApi(imex.kit.kube, "gpu-feature-discovery")
        obj = {
            "apiVersion": "v1",
            "kind": "Node",
            "metadata": {"name": imex.kit.node, "labels": {GPU_CLIQUE_LABEL: imex.clique}},
        }
        await master.apply(NODE, obj, manager="gpu-feature-discovery")
        await label.write()
        assert label.second_writer == "gpu-feature-discovery"
        assert await value(imex) == imex.clique

    asyncio.run(story())


def test_a_node_without_a_clique_has_no_label(imex):
    imex.declare(gpus=[{}])

    async def story():
        await imex.kit.boot()
        label = CliqueLabel(imex.api, imex.kit.node, imex.view())
        await label.write()
        assert await value(imex) is None

    asyncio.run(story())


def test_stopping_removes_it_unless_warm_daemons_stand_on_it(imex):
    async def story():
        await imex.kit.boot()
        for keep, left in ((True, imex.clique), (False, None)):
            label = CliqueLabel(imex.api, imex.kit.node, imex.view(), keep=keep)
            running = asyncio.create_task(label.run())
            await asyncio.sleep(1.0)
            assert await value(imex) == imex.clique
            running.cancel()
            await asyncio.wait({running})
            assert running.cancelled()
            assert await value(imex) == left

    run_simulation(1, story)
