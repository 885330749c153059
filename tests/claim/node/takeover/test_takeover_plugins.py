"""Our plugins on a node that was taken over: kubelet's next calls, and remains of NVIDIA's driver."""

import asyncio

import pytest
from tests.claim.node.imex.conftest import ImexKit
from tests.claim.node.takeover.nvidia_files import Node, checkpoint_file, imex_claim

from rackloom.claim.node.takeover.node_files import apply_takeover, give_back
from rackloom.core.cluster.claims import ClaimRef
from rackloom.core.cluster.names import COMPUTE_DOMAIN_LABEL, IMEX_DRIVER
from rackloom.core.cluster.objects import NODE
from rackloom.errors import Refused


@pytest.fixture
def imex(kit, tmp_path):
    return ImexKit(kit, tmp_path)


@pytest.fixture
def node(kit):
    """The same directories as the plugin's."""
    return Node(kit.places.plugins.parent)


def test_a_plugin_that_finds_nvidias_checkpoint_says_how_to_take_it_over(imex, node):
    path = node.install(checkpoint_file({"u": imex_claim("u", "channel")}))
    found = path.read_bytes()

    async def story():
        await imex.kit.boot()
        with pytest.raises(Refused, match=f"checkpoint {path} is of NVIDIA's DRA driver") as refused:
            async with imex.kit.plugin(imex.plugin()):
                pass
        assert refused.value.nearest_fix == (
            "take it over: rackloom takeover plan, then rackloom takeover apply"
        )

    asyncio.run(story())
    assert path.read_bytes() == found


def test_prepared_claims_stay_prepared_and_end_like_our_own(imex, node):
    """NVIDIA's driver prepared a channel and its daemon, and left a CDI file of a claim that is gone."""

    async def story():
        await imex.kit.boot()
        domain = await imex.domain()
        channel, daemon = await imex.channel("work", domain), await imex.daemon("daemon", domain)
        labels = {"metadata": {"labels": {COMPUTE_DOMAIN_LABEL: domain}}}
        found = await imex.api.get(NODE, imex.kit.node)
        await imex.api.replace(NODE, {**found, "metadata": {**found["metadata"], **labels["metadata"]}})
        claims = {
            ref.uid: imex_claim(ref.uid, kind, domain, name=ref.name, namespace=ref.namespace)
            for kind, ref in (("channel", channel.ref), ("daemon", daemon.ref))
        }
        path = node.install(checkpoint_file(claims))
        specs = {uid: node.add_cdi(IMEX_DRIVER, uid) for uid in (channel.uid, daemon.uid, "u-gone")}
        home = imex.settings().domains / domain
        home.mkdir(parents=True)
        apply_takeover(node.places, [IMEX_DRIVER])

        async with imex.kit.plugin(imex.plugin()) as running, imex.kit.kubelet() as kubelet:
            await kubelet.registered(IMEX_DRIVER)
            await running.sweeper.sweep()
            assert not specs["u-gone"].exists()
            # No daemon is READY, so that any new prepare would have to wait.
            (device,) = (await kubelet.prepare(channel))[channel.uid]
            assert device.cdi_ids == (f"k8s.{IMEX_DRIVER}/claim={channel.uid}-channel-0",)
            (device,) = (await kubelet.prepare(daemon))[daemon.uid]
            assert device.cdi_ids == (
                f"k8s.{IMEX_DRIVER}/device=all",
                f"k8s.{IMEX_DRIVER}/claim={daemon.uid}-daemon-0",
            )
            assert specs[channel.uid].read_text() == "of NVIDIA's driver", (
                "containers may start again from it"
            )
            assert await imex.label() == domain
            assert home.is_dir()

            await kubelet.unprepare(channel)
            assert await imex.label() is None
            assert not specs[channel.uid].exists()
            assert set(running.checkpoint.claims) == {daemon.uid}

        give_back(node.places, [IMEX_DRIVER])
        assert path.read_bytes() == checkpoint_file({daemon.uid: claims[daemon.uid]})

    asyncio.run(story())


def test_a_claim_without_its_cdi_file_is_prepared_anew(imex, node):
    async def story():
        await imex.kit.boot()
        domain = await imex.domain()
        channel = await imex.channel("work", domain)
        ref: ClaimRef = channel.ref
        claim = imex_claim(ref.uid, "channel", domain, name=ref.name, namespace=ref.namespace)
        node.install(checkpoint_file({ref.uid: claim}))
        apply_takeover(node.places, [IMEX_DRIVER])
        async with imex.kit.plugin(imex.plugin()), imex.kit.kubelet() as kubelet:
            await kubelet.registered(IMEX_DRIVER)
            await imex.ready(domain)
            (device,) = (await kubelet.prepare(channel))[channel.uid]
            assert device.cdi_ids == (f"k8s.{IMEX_DRIVER}/claim={channel.uid}-channel-0",)
            assert imex.edits(channel.uid)["deviceNodes"]
            assert await imex.label() == domain

    asyncio.run(story())
