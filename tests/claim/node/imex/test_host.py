"""The kernel's records of IMEX, and directories that are no longer needed."""

import asyncio

import pytest

from rackloom.claim.node.cdi import ImexKernel
from rackloom.core.cluster import names
from rackloom.core.cluster.objects import COMPUTE_DOMAIN
from rackloom.errors import Refused


def test_a_driver_without_imex_is_refused(tmp_path):
    (tmp_path / "devices").write_text("Character devices:\n  1 mem\n\nBlock devices:\n  8 sd\n")
    kernel = ImexKernel(proc_devices=tmp_path / "devices", imex_capability=tmp_path / "missing")
    with pytest.raises(Refused, match="lists no character device nvidia-caps-imex-channels"):
        kernel.channel_major()
    with pytest.raises(Refused, match="does not name the IMEX management device"):
        kernel.management_node()
    (tmp_path / "missing").write_text("DeviceFileMode: 438\n")
    with pytest.raises(Refused, match="DeviceFileMinor"):
        kernel.management_node()


def test_directories_of_domains_that_are_gone_are_removed(imex):
    async def story():
        await imex.kit.boot()
        living, used = await imex.domain("living"), await imex.domain("used")
        claim = await imex.daemon("daemon", used)
        domains = imex.settings().domains
        async with imex.kit.plugin(imex.plugin()) as process:
            await process.requests.prepare([claim.ref])
            await imex.api.delete(COMPUTE_DOMAIN, "used", "default")
            for uid in (living, "gone"):
                (domains / uid).mkdir()
                (domains / uid / "imexd.cfg").touch()
            await process.sweeper.sweep()
            assert {path.name for path in domains.iterdir()} == {living, used}
            await process.requests.unprepare([claim.ref])
            await process.sweeper.sweep()
            assert {path.name for path in domains.iterdir()} == {living}

    asyncio.run(story())


def test_health_follows_the_fabric(imex):
    async def story():
        await imex.kit.boot()
        async with imex.kit.plugin(imex.plugin()), imex.kit.kubelet() as kubelet:
            plugin = await kubelet.registered(names.IMEX_DRIVER)
            assert await reported(plugin) == {"channel-0": (1, ""), "daemon-0": (1, "")}
            imex.declare(clusterUUID=imex.cluster, cliqueId=1, gpus=[{"health": "Unhealthy"}])
            assert await reported(plugin) == dict.fromkeys(("channel-0", "daemon-0"), (2, "gpu-0: declared"))
            imex.declare(clusterUUID=imex.cluster, cliqueId=1, gpus=[{"state": "inProgress"}])
            why = "gpu-0 has not joined its NVLink fabric: in progress"
            assert await reported(plugin) == dict.fromkeys(("channel-0", "daemon-0"), (0, why))

    async def reported(plugin):
        return await anext(plugin.health())

    asyncio.run(story())
