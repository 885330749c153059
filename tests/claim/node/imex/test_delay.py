"""The time that a channel waits for us, and its cost for the API server, in virtual time."""

import asyncio

from rackloom.claim.node.run import PluginProcess
from rackloom.core.cluster import names
from rackloom.lab.kube.direct import DirectApi
from rackloom.lab.virtual.event_loop import run_simulation

API_SECONDS = 0.005


def test_a_channel_is_there_soon_after_its_daemon_is_ready(imex):
    kube = imex.kit.kube

    async def story():
        await imex.kit.boot()
        uid = await imex.domain()
        claim = await imex.channel("work", uid)
        imex.kit.places.home(names.IMEX_DRIVER).mkdir(parents=True)
        kube.faults.delay(API_SECONDS)
        api = DirectApi(kube, "the-plugin")
        plugin_process = PluginProcess(imex.plugin(api), api, imex.kit.host())
        waiting = asyncio.create_task(plugin_process.requests.prepare([claim.ref]))
        # In the middle of the longest pause: nothing but the watch can wake it in time.
        await asyncio.sleep(11.0)
        await imex.ready(uid)
        ready = asyncio.get_running_loop().time()
        (answer,) = (await waiting).values()
        assert answer.devices
        return asyncio.get_running_loop().time() - ready

    assert run_simulation(1, story) < 0.1
    assert kube.writes("the-plugin") == 1
