"""The IMEX plugin, a kubelet and an API server: a channel that waits for a daemon on the same plugin."""

import asyncio
import os
from collections.abc import Callable
from typing import Any

import pytest
from tests.claim.node.plugin_manager import NotPrepared
from tests.waiting import until_so

from rackloom.core.cluster import names
from rackloom.core.cluster.names import ImexIsolation, ImexMode
from rackloom.core.cluster.objects import COMPUTE_DOMAIN, NODE, POD, RESOURCE_SLICE

CHANNELS = "/dev/nvidia-caps-imex-channels"


def node_of(path, major, minor, mode):
    """A device node of a CDI spec, in full."""
    return {
        "path": path,
        "type": "c",
        "major": major,
        "minor": minor,
        "fileMode": mode,
        "permissions": "rwm",
    }


@pytest.mark.parametrize("version", ["v1", "v1beta1"])
def test_a_channel_waits_while_the_daemon_that_it_waits_for_is_prepared_by_the_same_plugin(
    imex, version, read_specs
):
    async def story():
        await imex.kit.boot()
        imex.install_driver()
        uid = await imex.domain()
        channel, daemon = await imex.channel("work", uid), await imex.daemon("daemon", uid)
        async with imex.kit.plugin(imex.plugin()) as running, imex.kit.kubelet(version) as kubelet:
            await kubelet.registered(names.IMEX_DRIVER)
            waiting = asyncio.create_task(kubelet.prepare(channel))
            await imex.labelled(uid)
            (prepared,) = (await kubelet.prepare(daemon))[daemon.uid]
            assert not waiting.done()
            assert prepared.cdi_ids == (
                "k8s.compute-domain.nvidia.com/device=all",
                f"k8s.compute-domain.nvidia.com/claim={daemon.uid}-daemon-0",
            )
            edits = imex.edits(daemon.uid)
            assert edits["env"] == [
                f"CLIQUE_ID={imex.clique}",
                f"COMPUTE_DOMAIN_UUID={uid}",
                "COMPUTE_DOMAIN_NAME=cd",
                "COMPUTE_DOMAIN_NAMESPACE=default",
                "IMEX_BOOT_ID=",
            ]
            home = imex.settings().domains / uid
            options = ["rw", "nosuid", "nodev", "bind"]
            assert edits["mounts"] == [{"hostPath": str(home), "containerPath": "/imexd", "options": options}]
            assert home.is_dir()
            assert edits["deviceNodes"] == [node_of("/dev/nvidia-caps/nvidia-cap512", 236, 512, 0o666)]
            (container,) = read_specs(imex.kit.places.cdi, prepared.cdi_ids).containers
            assert container.allowed == {(236, 512, "rwm")}
            assert "/usr/bin/nvidia-imex" in container.mounts

            await imex.ready(uid)
            (device,) = (await waiting)[channel.uid]
            assert device.cdi_ids == (f"k8s.compute-domain.nvidia.com/claim={channel.uid}-channel-0",)
            node = node_of(f"{CHANNELS}/channel0", 235, 0, 0o666)
            assert imex.edits(channel.uid) == {"deviceNodes": [node]}
            # No program made the channel's file here, as on a host.
            (container,) = read_specs(imex.kit.places.cdi, device.cdi_ids).containers
            assert [made["path"] for made in container.devices] == [f"{CHANNELS}/channel0"]
            assert container.allowed == {(235, 0, "rwm")}

            await kubelet.unprepare(channel)
            assert await imex.label() is None
            await kubelet.unprepare(daemon)
            assert running.checkpoint.claims == {}
            (base,) = imex.kit.places.cdi.iterdir()
            assert base.name == "k8s.compute-domain.nvidia.com-device_base.yaml"

    asyncio.run(story())


def test_the_slice_names_the_clique_and_the_gpus_as_the_fabric_knows_them(imex):
    async def story():
        await imex.kit.boot()
        async with imex.kit.plugin(imex.plugin()) as running:
            await running.publisher.published.wait()
            (found,) = (await imex.api.list(RESOURCE_SLICE)).items
        assert found["spec"]["nodeName"] == found["spec"]["pool"]["name"] == imex.kit.node
        assert found["metadata"]["ownerReferences"][0]["kind"] == "Node"
        devices = {device["name"]: device["attributes"] for device in found["spec"]["devices"]}
        assert devices.keys() == {"channel-0", "daemon-0"}
        channel = devices["channel-0"]
        assert (channel["type"], channel["id"]) == ({"string": "channel"}, {"int": 0})
        assert channel["clique"] == {"string": imex.clique}
        assert (channel["chassisSerial"], channel["slot"]) == ({"string": "1820325190001"}, {"int": 3})
        assert channel["tray"] == {"int": 2}
        assert channel["module4UUID"] == {"string": "GPU-00000004"}
        assert channel["module4FabricGUID"] == {"string": "0x7c0a000000000004"}
        assert len(channel) <= 32

    asyncio.run(story())


def test_all_channels_when_the_domain_says_so(imex, read_specs):
    async def story():
        await imex.kit.boot()
        uid = await imex.domain()
        await imex.ready(uid)
        claim = await imex.channel("work", uid, "All")
        async with imex.kit.plugin(imex.plugin()), imex.kit.kubelet() as kubelet:
            await kubelet.registered(names.IMEX_DRIVER)
            (device,) = (await kubelet.prepare(claim))[claim.uid]
        (container,) = read_specs(imex.kit.places.cdi, device.cdi_ids).containers
        paths = [node["path"] for node in container.devices]
        assert paths == [f"{CHANNELS}/channel{number}" for number in range(2048)]

    asyncio.run(story())


def test_without_a_clique_the_claim_succeeds_without_a_device(imex):
    imex.declare(gpus=[{}])

    async def story():
        await imex.kit.boot()
        uid = await imex.domain()
        claim = await imex.channel("work", uid)
        async with imex.kit.plugin(imex.plugin()), imex.kit.kubelet() as kubelet:
            await kubelet.registered(names.IMEX_DRIVER)
            (device,) = (await kubelet.prepare(claim))[claim.uid]
            assert (device.name, device.cdi_ids) == ("channel-0", ())
            assert await imex.label() == uid

    asyncio.run(story())


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"allocationmode": "All"}, '"allocationmode"'),
        ({"domainID": ""}, "domainID"),
        ({"domainID": "not-a-domain"}, "there is no ComputeDomain with UID not-a-domain"),
        ({"kind": "ComputeDomainDaemonConfig"}, "cannot apply ComputeDomainDaemonConfig to request r"),
    ],
)
def test_what_the_user_must_change_is_said_at_once_and_leaves_no_trace(imex, change, named):
    async def story():
        await imex.kit.boot()
        uid = await imex.domain()
        plain = {"apiVersion": names.API_VERSION, "kind": "ComputeDomainChannelConfig", "domainID": uid}
        claim = await imex.claim("work", "default", "channel-0", {**plain, **change})
        async with imex.kit.plugin(imex.plugin()), imex.kit.kubelet() as kubelet:
            await kubelet.registered(names.IMEX_DRIVER)
            with pytest.raises(NotPrepared, match=named) as refused:
                await kubelet.prepare(claim)
            assert str(refused.value).startswith("Permanent error: ")
            assert await imex.label() is None
            await kubelet.unprepare(claim)
            assert list(imex.kit.places.cdi.iterdir()) == []

    asyncio.run(story())


@pytest.mark.parametrize("held", [True, False], ids=["being deleted", "gone"])
def test_a_domain_that_is_deleted_gets_no_label_again(imex, held):
    async def story():
        await imex.kit.boot()
        uid = await imex.domain()
        (domain,) = (await imex.api.list(COMPUTE_DOMAIN)).items
        await imex.ready(uid)
        first, second = await imex.channel("first", uid), await imex.channel("second", uid)
        async with imex.kit.plugin(imex.plugin()), imex.kit.kubelet() as kubelet:
            await kubelet.registered(names.IMEX_DRIVER)
            await kubelet.prepare(first)
            await kubelet.unprepare(first)
            if held:
                meta = {"finalizers": [names.FINALIZER]}
                await imex.api.patch(COMPUTE_DOMAIN, "cd", "default", {"metadata": meta})
            await imex.api.delete(COMPUTE_DOMAIN, domain["metadata"]["name"], "default")
            with pytest.raises(NotPrepared, match="ComputeDomain default/cd of this claim is deleted"):
                await kubelet.prepare(second)
            assert await imex.label() is None

    asyncio.run(story())


def test_a_claim_of_another_namespace_is_refused(imex):
    async def story():
        await imex.kit.boot()
        uid = await imex.domain(namespace="rackloom-imex")
        claim = await imex.channel("work", uid)
        async with imex.kit.plugin(imex.plugin()), imex.kit.kubelet() as kubelet:
            await kubelet.registered(names.IMEX_DRIVER)
            with pytest.raises(NotPrepared, match="not in namespace default of the claim"):
                await kubelet.prepare(claim)

    asyncio.run(story())


def test_a_daemon_claim_of_a_tenant_is_refused(imex):
    async def story():
        await imex.kit.boot()
        claim = await imex.daemon("daemon", await imex.domain(), namespace="default")
        async with imex.kit.plugin(imex.plugin()), imex.kit.kubelet() as kubelet:
            await kubelet.registered(names.IMEX_DRIVER)
            with pytest.raises(NotPrepared, match="in namespace rackloom-imex only"):
                await kubelet.prepare(claim)

    asyncio.run(story())


def test_daemons_of_an_earlier_namespace_are_served_as_before(imex):
    """After an upgrade that moved new daemons elsewhere, a pod of a running job still comes to a node."""

    async def story():
        await imex.kit.boot()
        uid = await imex.domain()
        channel, daemon = await imex.channel("work", uid), await imex.daemon("daemon", uid)
        now = imex.plugin(namespaces=("rackloom-system", imex.namespace))
        async with imex.kit.plugin(now), imex.kit.kubelet() as kubelet:
            await kubelet.registered(names.IMEX_DRIVER)
            await kubelet.prepare(daemon)
            await imex.ready(uid)
            await kubelet.prepare(channel)
            assert imex.edits(channel.uid)["deviceNodes"]

    asyncio.run(story())


def test_a_second_domain_waits_until_the_first_has_left_the_node(imex):
    async def story():
        await imex.kit.boot()
        first, second = await imex.domain("one"), await imex.domain("two")
        await imex.ready(second)
        await imex.api.patch(
            NODE, imex.kit.node, None, {"metadata": {"labels": {names.COMPUTE_DOMAIN_LABEL: first}}}
        )
        claim = await imex.channel("work", second)
        async with imex.kit.plugin(imex.plugin()) as running, imex.kit.kubelet() as kubelet:
            await kubelet.registered(names.IMEX_DRIVER)
            (answer,) = (await running.requests.prepare([claim.ref], 0.5)).values()
            assert answer.error == (
                f"node {imex.kit.node} still belongs to ComputeDomain {first}: it can be in one at a time"
            )
            waiting = asyncio.create_task(kubelet.prepare(claim))
            await imex.api.patch(
                NODE, imex.kit.node, None, {"metadata": {"labels": {names.COMPUTE_DOMAIN_LABEL: None}}}
            )
            await waiting
            assert await imex.label() == second

    asyncio.run(story())


@pytest.mark.slow
def test_ready_of_an_earlier_boot_does_not_count(imex):
    async def story():
        await imex.kit.boot()
        uid = await imex.domain()
        await imex.ready(uid)
        claim = await imex.channel("work", uid)
        plugin = imex.plugin(boot_id="now")
        output = imex.settings().domains / uid / names.BOOT_FILE
        output.parent.mkdir(parents=True)
        async with imex.kit.plugin(plugin) as running:
            for boot in ("before", ""):
                output.write_text(boot)
                (answer,) = (await running.requests.prepare([claim.ref], 0.3)).values()
                assert "is not ready on this node" in answer.error
            output.unlink()
            hostile: list[Callable[[], Any]] = [
                lambda: output.symlink_to(imex.root / "now"),
                lambda: os.mkfifo(output),
                lambda: output.write_text("now" * 1000),
            ]
            (imex.root / "now").write_text("now")
            for put in hostile:
                put()
                (answer,) = (await running.requests.prepare([claim.ref], 0.3)).values()
                assert "is not ready on this node" in answer.error
                output.unlink()
            output.write_text("now")
            (answer,) = (await running.requests.prepare([claim.ref], 0.3)).values()
            assert not answer.error

    asyncio.run(story())


@pytest.mark.slow
def test_the_label_stays_while_another_channel_of_the_domain_is_used(imex):
    async def story():
        await imex.kit.boot()
        uid = await imex.domain()
        await imex.ready(uid, status="NotReady")
        old, new = await imex.channel("old", uid), await imex.channel("new", uid)
        async with imex.kit.plugin(imex.plugin()) as running:
            for claim in (old, new):
                (answer,) = (await running.requests.prepare([claim.ref], 0.3)).values()
                assert "is not ready on this node" in answer.error
            await running.requests.unprepare([old.ref])
            assert await imex.label() == uid
            await running.requests.unprepare([new.ref])
            assert await imex.label() is None

    asyncio.run(story())


def test_in_channel_mode_a_shared_claim_gets_its_own_channel(imex):
    async def story():
        await imex.kit.boot()
        uid = await imex.domain()
        await imex.ready("warm-domain")
        claim = await imex.isolated("shared", uid, 7)
        plugin = imex.plugin(isolation=ImexIsolation.CHANNEL)
        async with imex.kit.plugin(plugin) as running, imex.kit.kubelet() as kubelet:
            await kubelet.registered(names.IMEX_DRIVER)
            await kubelet.prepare(claim)
            (node,) = imex.edits(claim.uid)["deviceNodes"]
            assert (node["path"], node["minor"]) == (f"{CHANNELS}/channel7", 7)
            assert await imex.label() is None
            await running.publisher.published.wait()
            (found,) = (await imex.api.list(RESOURCE_SLICE)).items
            assert [device["name"] for device in found["spec"]["devices"]] == ["daemon-0"]

    asyncio.run(story())


def test_in_channel_mode_what_would_break_isolation_is_refused(imex):
    async def story():
        await imex.kit.boot()
        uid = await imex.domain()
        await imex.ready("warm-domain")
        pod = {
            "apiVersion": "v1",
            "kind": "Pod",
            "metadata": {"name": "p", "namespace": "default"},
            "spec": {},
        }
        made = await imex.api.create(POD, pod)
        owner = {"apiVersion": "v1", "kind": "Pod", "name": "p", "uid": made["metadata"]["uid"]}
        claims = {
            "was made from a template for pod p": await imex.isolated("a", uid, 1, ownerReferences=[owner]),
            "was made from a template for pod unknown": await imex.isolated(
                "b", uid, 2, annotations={"resource.kubernetes.io/pod-claim-name": "channel"}
            ),
            "a channel of its own, and not channel-0": await imex.channel("c", uid),
        }
        plugin = imex.plugin(isolation=ImexIsolation.CHANNEL)
        async with imex.kit.plugin(plugin), imex.kit.kubelet() as kubelet:
            await kubelet.registered(names.IMEX_DRIVER)
            for why, claim in claims.items():
                with pytest.raises(NotPrepared, match=f"Permanent error: .*{why}"):
                    await kubelet.prepare(claim)

    asyncio.run(story())


def test_in_channel_mode_the_warm_daemon_must_be_ready(imex):
    async def story():
        await imex.kit.boot()
        uid = await imex.domain()
        claim = await imex.isolated("shared", uid, 3)
        async with imex.kit.plugin(imex.plugin(isolation=ImexIsolation.CHANNEL)) as running:
            (answer,) = (await running.requests.prepare([claim.ref], 0.3)).values()
            assert answer.error == f"the IMEX daemon of clique {imex.clique} is not ready on this node"

    asyncio.run(story())


@pytest.mark.parametrize("reason", [names.WAITING_FOR_QUOTA, names.WITHDRAWN])
@pytest.mark.parametrize("isolation", [ImexIsolation.DOMAIN, ImexIsolation.CHANNEL])
def test_a_claim_by_hand_of_a_domain_without_quota_waits_as_well(imex, isolation, reason):
    async def story():
        await imex.kit.boot()
        uid = await imex.domain()
        await imex.ready("warm-domain")
        is_alone = isolation is ImexIsolation.CHANNEL
        claim = await (imex.isolated("by-hand", uid, 7) if is_alone else imex.channel("by-hand", uid))
        why = "waits for quota in queue team: Kueue has not decided yet"
        await report_quota(reason, why)
        async with imex.kit.plugin(imex.plugin(isolation=isolation)) as running:
            (answer,) = (await running.requests.prepare([claim.ref], 0.3)).values()
            assert answer.error == f"ComputeDomain default/cd {why}"
            assert await imex.label() is None
            # A running domain that comes to need quota has its daemons, and its pods are replaced.
            await report_quota("KeptWithoutQuota", f"keeps what it has, and {why}")
            await imex.ready(uid)
            (answer,) = (await running.requests.prepare([claim.ref], 30.0)).values()
            assert answer.error == ""

    async def report_quota(reason, message):
        obj = await imex.api.get(COMPUTE_DOMAIN, "cd", "default")
        condition = {
            "type": names.QUOTA_RESERVED,
            "status": "False",
            "reason": reason,
            "message": message,
            "lastTransitionTime": "2026-01-01T00:00:00Z",
        }
        status = {"status": "NotReady", "conditions": [condition]}
        await imex.api.replace(COMPUTE_DOMAIN, {**obj, "status": status}, subresource="status")

    asyncio.run(story())


@pytest.mark.slow
def test_a_host_that_runs_imex_itself_is_asked(imex, monkeypatch):
    tools = imex.root / "bin"
    tools.mkdir()
    output = imex.root / "output"
    (tools / "chroot").write_text(f'#!/bin/sh\necho "$@" > {imex.root}/asked\ncat {output}\n')
    (tools / "chroot").chmod(0o755)
    monkeypatch.setenv("PATH", str(tools), prepend=":")
    output.write_text("INITIALIZING\n")

    async def story():
        await imex.kit.boot()
        uid = await imex.domain()
        claim, daemon = await imex.channel("work", uid), await imex.daemon("daemon", uid)
        async with imex.kit.plugin(imex.plugin(mode=ImexMode.HOST_MANAGED)) as running:
            (answer,) = (await running.requests.prepare([claim.ref], 3.0)).values()
            assert answer.error == "the host's nvidia-imex says 'INITIALIZING', not READY"
            output.write_text("READY\n")
            (answer,) = (await running.requests.prepare([claim.ref], 30.0)).values()
            assert answer.error == ""
            assert (imex.root / "asked").read_text().split()[1:] == [
                *("nvidia-imex-ctl", "-q", "-u", "/etc/nvidia-imex/imex_ctrl.sock")
            ]
            assert await imex.label() is None
            (answer,) = (await running.requests.prepare([daemon.ref], 5.0)).values()
            assert "no daemon claim is prepared here" in answer.error
            assert (await running.publisher.plugin.pools())[0].devices[-1].name == "channel-0"

    asyncio.run(story())


def test_nothing_is_published_of_a_fabric_that_is_not_settled(imex):
    imex.declare(clusterUUID=imex.cluster, state="inProgress", gpus=[{}])
    failed = 'error_type="publish_resources"} '

    async def story():
        await imex.kit.boot()
        async with imex.kit.plugin(imex.plugin()) as process:
            await until_so(
                lambda: f"{failed}1.0" in process.metrics_page().decode(), "the failure is counted"
            )
            assert (await imex.api.list(RESOURCE_SLICE)).items == ()
            assert not process.publisher.published.is_set()
            imex.declare(clusterUUID=imex.cluster, cliqueId=1, gpus=[{}])
            process.publisher.wake()
            await process.publisher.published.wait()
            assert len((await imex.api.list(RESOURCE_SLICE)).items) == 1

    asyncio.run(story())
