"""A plugin and a kubelet over real unix sockets."""

import asyncio
import json
import socket
import stat

import msgspec
import pytest
from tests.claim.node.conftest import HURRY
from tests.claim.node.plugin_manager import NotPrepared
from tests.waiting import until, until_so

from rackloom.claim.kube.api import KubeError
from rackloom.claim.node import run
from rackloom.claim.node.requests import RETRY_ANNOTATION
from rackloom.claim.node.run import PluginProcess, registrar_path, run_plugin
from rackloom.claim.node.tasks import beside
from rackloom.core.cluster.objects import POD, RESOURCE_CLAIM, RESOURCE_SLICE
from rackloom.errors import Refused, Retry
from rackloom.lab.virtual.event_loop import run_simulation as virtual


@pytest.mark.parametrize("version", ["v1", "v1beta1"])
def test_a_claim_is_prepared_and_given_back(kit, version):
    async def story():
        await kit.boot()
        claim = await kit.claim("c1", "toy-1")
        async with kit.plugin() as process, kit.kubelet(version) as kubelet:
            await kubelet.registered(kit.driver)
            assert process.registrar.registered is True
            (device,) = (await kubelet.prepare(claim))[claim.uid]
            cdi_id = f"k8s.{kit.driver}/claim={claim.uid}-toy-1"
            assert (device.requests, device.pool, device.name) == (("r",), kit.node, "toy-1")
            assert device.cdi_ids == (cdi_id,)
            spec = kit.places.cdi / f"k8s.{kit.driver}-claim_{claim.uid}.yaml"
            written = json.loads(spec.read_bytes())
            assert written["devices"][0]["containerEdits"] == {"env": ["TOY=toy-1"]}
            await kubelet.unprepare(claim)
            assert not spec.exists()
            assert process.checkpoint.claims == {}

    asyncio.run(story())


def test_kubelet_hears_of_every_claim_and_why_one_failed(kit):
    async def story():
        await kit.boot()
        good, bad = await kit.claim("good", "toy-0"), await kit.claim("bad", "toy-1")
        kit.toys.trouble["bad"] = Refused("it is broken", nearest_fix="mend it")
        async with kit.plugin() as process, kit.kubelet() as kubelet:
            await kubelet.registered(kit.driver)
            with pytest.raises(NotPrepared, match=r"^Permanent error: it is broken; mend it$"):
                await kubelet.prepare(good, bad)
            assert {uid: entry.state.value for uid, entry in process.checkpoint.claims.items()} == {
                good.uid: "PrepareCompleted",
                bad.uid: "PrepareStarted",
            }

    asyncio.run(story())


@pytest.mark.slow
def test_what_did_not_end_in_time_is_answered_with_its_last_error(kit, monkeypatch):
    # The plugin gives up after three seconds. Its caller has time to hear of it.
    monkeypatch.setattr(run, "_MARGIN", HURRY.call - 3.0)

    async def story():
        await kit.boot()
        claim = await kit.claim("slow")
        kit.toys.trouble["slow"] = Retry("the daemon is not ready", after=0.0)
        async with kit.plugin(), kit.kubelet() as kubelet:
            await kubelet.registered(kit.driver)
            with pytest.raises(NotPrepared, match=r"^the daemon is not ready$"):
                await kubelet.prepare(claim)
            assert len(kit.toys.prepared) > 1
            del kit.toys.trouble["slow"]
            assert (await kubelet.prepare(claim))[claim.uid][0].name == "toy-0"

    asyncio.run(story())


@pytest.mark.slow
def test_what_did_not_end_in_time_goes_on_without_kubelet(kit, monkeypatch):
    monkeypatch.setattr(run, "_MARGIN", HURRY.call - 1.0)

    async def story():
        await kit.boot()
        claim = await kit.claim("slow")
        pod = await waiting_pod(kit, "slow")
        kit.toys.trouble["slow"] = Retry("the daemon is not ready", after=0.0)
        async with kit.plugin() as process, kit.kubelet() as kubelet:
            await kubelet.registered(kit.driver)
            with pytest.raises(NotPrepared, match=r"^the daemon is not ready$"):
                await kubelet.prepare(claim)
            before = await retry_annotation(kit, pod)
            kit.now += 1
            del kit.toys.trouble["slow"]
            await until_so(lambda: process.checkpoint.claims[claim.uid].devices, "the claim is prepared")

            async def synced():
                return await retry_annotation(kit, pod) != before

            await until(synced, "kubelet is made to ask again")

    asyncio.run(story())


def test_pods_that_came_before_the_plugin_are_synced_when_it_is_registered(kit):
    async def story():
        await kit.boot()
        await kit.claim("early")
        pod = await waiting_pod(kit, "early")
        async with kit.plugin():
            await asyncio.sleep(0.2)
            assert await retry_annotation(kit, pod) == ""
            async with kit.kubelet():
                await until(lambda: retry_annotation(kit, pod), "the pod is synced")

    asyncio.run(story())


async def waiting_pod(kit, claim):
    spec = {
        "nodeName": kit.node,
        "containers": [{"name": "main", "image": "none"}],
        "resourceClaims": [{"name": "toy", "resourceClaimName": claim}],
    }
    made = await kit.api.create(POD, {"metadata": {"name": claim, "namespace": "default"}, "spec": spec})
    return made["metadata"]["name"]


async def retry_annotation(kit, pod):
    found = await kit.api.get(POD, pod, "default")
    return found["metadata"].get("annotations", {}).get(RETRY_ANNOTATION, "")


def test_a_waiting_claim_is_tried_again_when_something_changed(kit):
    async def story():
        await kit.boot()
        claim = await kit.claim("slow")
        kit.toys.trouble["slow"] = Retry("not yet", after=1000.0)
        async with kit.plugin(), kit.kubelet() as kubelet:
            await kubelet.registered(kit.driver)
            waiting = asyncio.create_task(kubelet.prepare(claim))
            await until_so(lambda: kit.toys.prepared, "the first attempt")
            del kit.toys.trouble["slow"]
            kit.toys.woken.put_nowait(None)
            assert (await waiting)[claim.uid]

    asyncio.run(story())


def test_a_replaced_claim_and_a_vanished_one_are_told(kit):
    async def story():
        await kit.boot()
        claim = await kit.claim("c1")
        await kit.api.delete(RESOURCE_CLAIM, "c1", "default")
        async with kit.plugin(), kit.kubelet() as kubelet:
            await kubelet.registered(kit.driver)
            with pytest.raises(NotPrepared, match="does not exist any more"):
                await kubelet.prepare(claim)
            await kit.claim("c1")
            with pytest.raises(NotPrepared, match="got replaced"):
                await kubelet.prepare(claim)
            await kubelet.unprepare(claim)

    asyncio.run(story())


def test_prepared_again_it_is_the_same_and_the_plugin_is_not_asked(kit):
    async def story():
        await kit.boot()
        claim = await kit.claim("c1")
        async with kit.plugin(), kit.kubelet() as kubelet:
            await kubelet.registered(kit.driver)
            first = await kubelet.prepare(claim)
        async with kit.plugin() as process, kit.kubelet() as kubelet:
            await kubelet.registered(kit.driver)
            await kit.api.delete(RESOURCE_CLAIM, "c1", "default")
            assert await kubelet.prepare(claim) == first
            assert kit.toys.prepared == [claim.uid]
            await kubelet.unprepare(claim)
            await kubelet.unprepare(claim)
            assert kit.toys.unprepared == [claim.uid]
            assert process.checkpoint.claims == {}

    asyncio.run(story())


def test_a_claim_whose_cdi_spec_is_gone_is_prepared_anew(kit):
    async def story():
        await kit.boot()
        claim = await kit.claim("c1")
        async with kit.plugin() as process:
            await process.requests.prepare([claim.ref])
            (spec,) = kit.places.cdi.iterdir()
            spec.unlink()
            (answer,) = (await process.requests.prepare([claim.ref])).values()
            assert answer.devices
            assert spec.exists()

    asyncio.run(story())


@pytest.mark.slow
def test_a_device_is_not_given_to_two_claims(kit):
    async def story():
        await kit.boot()
        first, two = await kit.claim("one"), await kit.claim("two")
        async with kit.plugin() as process:
            await process.requests.prepare([first.ref])
            (answer,) = (await process.requests.prepare([two.ref], 0.3)).values()
            assert answer.error == "device toy-0 is still held by claim default/one on this node"
            waiting = asyncio.create_task(process.requests.prepare([two.ref]))
            await process.requests.unprepare([first.ref])
            (answer,) = (await waiting).values()
            assert answer.devices[0].device == "toy-0"

    asyncio.run(story())


def test_a_given_up_claim_is_not_brought_back_by_a_late_prepare(kit):
    async def story():
        await kit.boot()
        claim = await kit.claim("c1")
        kit.toys.trouble["c1"] = Retry("not yet", after=0.0)
        async with kit.plugin() as process:
            await process.requests.prepare([claim.ref], 0.2)
            del kit.toys.trouble["c1"]
            await process.requests.unprepare([claim.ref])
            (late,) = (await process.requests.prepare([claim.ref])).values()
            assert late.error.startswith("Permanent error: stale prepare")
            kit.now += 91
            (later,) = (await process.requests.prepare([claim.ref])).values()
            assert later.devices

    asyncio.run(story())


def test_another_pod_may_use_a_shared_claim_that_was_given_up(kit):
    async def story():
        await kit.boot()
        claim = await kit.claim("c1")
        kit.toys.trouble["c1"] = Retry("not yet", after=0.0)
        async with kit.plugin() as process:
            await process.requests.prepare([claim.ref], 0.2)
            del kit.toys.trouble["c1"]
            await process.requests.unprepare([claim.ref])
            found = await kit.api.get(RESOURCE_CLAIM, "c1", "default")
            found["status"]["reservedFor"] = [{"resource": "pods", "name": "q", "uid": "q-uid"}]
            await kit.api.replace(RESOURCE_CLAIM, found, subresource="status")
            (answer,) = (await process.requests.prepare([claim.ref])).values()
            assert answer.devices

    asyncio.run(story())


def test_of_two_claims_that_go_at_once_the_last_sees_nobody_left(kit):
    async def story():
        await kit.boot()
        claims = [await kit.claim("one", "toy-0"), await kit.claim("two", "toy-1")]
        refs = [claim.ref for claim in claims]
        async with kit.plugin() as process:
            await process.requests.prepare(refs)
            await process.requests.unprepare(refs)
            assert kit.toys.others == [["two"], []]

    asyncio.run(story())


def test_sockets_are_private_come_late_and_leave_nothing(kit):
    async def story():
        await kit.boot()
        kit.places.registry.mkdir()
        stale = kit.places.registry / f"{kit.driver}-reg.sock"
        stale.touch()
        async with kit.plugin() as process:
            for path in (process.dra_socket, process.registrar_socket):
                mode = path.stat().st_mode
                assert stat.S_ISSOCK(mode)
                assert stat.S_IMODE(mode) == 0o600
            assert process.registrar_socket == stale
            assert await process.is_serving()
            with pytest.raises(Refused, match="another process serves"):
                async with kit.plugin():
                    raise AssertionError("two plugins at once")
        assert not stale.exists()
        assert not process.dra_socket.exists()
        assert not await process.is_serving()

    asyncio.run(story())


def test_a_long_driver_name_gets_a_hashed_socket_and_a_long_directory_is_refused(kit):
    long = "a" * 60 + ".example.com"
    found = registrar_path(kit.places.registry / ("d" * 30), long)
    assert len(str(found)) <= 107
    assert found.name.endswith("-reg.sock")
    places = msgspec.structs.replace(kit.places, plugins=kit.places.plugins / ("p" * 90))

    async def story():
        host = msgspec.structs.replace(kit.host(), directories=places)
        with pytest.raises(Refused, match="the kernel takes 107"):
            async with run_plugin(kit.toys, kit.api, host):
                raise AssertionError("no socket has such a path")

    asyncio.run(story())


def test_kubelet_is_told_how_the_devices_are(kit):
    async def story():
        await kit.boot()
        async with kit.plugin(), kit.kubelet() as kubelet:
            plugin = await kubelet.registered(kit.driver)
            async for reported in plugin.health():
                assert reported == {"toy-0": (1, ""), "toy-1": (1, "")}
                break

    asyncio.run(story())


def test_the_slices_follow_the_devices_and_come_back_when_they_were_wiped(kit):
    async def names():
        found = (await kit.api.list(RESOURCE_SLICE)).items
        return [device["name"] for slice_ in found for device in slice_["spec"]["devices"]]

    async def published(*wanted):
        async def look():
            return await names() == [*wanted]

        await until(look, f"{wanted} are published")

    async def story():
        await kit.boot()
        async with kit.plugin() as process:
            await published("toy-0", "toy-1")
            kit.toys.names = ["toy-2"]
            process.publisher.wake()
            await published("toy-2")
            (found,) = (await kit.api.list(RESOURCE_SLICE)).items
            assert found["spec"]["pool"]["generation"] == 2
            await kit.api.delete(RESOURCE_SLICE, found["metadata"]["name"])
            await published("toy-2")

    asyncio.run(story())


def test_metrics_count_from_zero(kit):
    async def story():
        await kit.boot()
        good, bad = await kit.claim("good"), await kit.claim("bad", "toy-1")
        kit.toys.trouble["bad"] = Refused("broken")
        async with kit.plugin() as process:
            before = process.metrics_page().decode()
            await process.requests.prepare([good.ref])
            await process.requests.prepare([bad.ref])
            assert await process.is_serving()
            return before, process.metrics_page().decode()

    before, after = asyncio.run(story())
    prepared = 'nvidia_dra_prepared_devices{device_type="toy",driver="toy.example.com",node="node-a"}'
    failed = 'nvidia_dra_node_prepare_errors_total{driver="toy.example.com",error_type="prepare_devices"}'
    done = 'nvidia_dra_requests_total{driver="toy.example.com",operation="prepare"}'
    for series, late in ((prepared, 1.0), (failed, 1.0), (done, 1.0)):
        assert f"{series} 0.0\n" in before
        assert f"{series} {late}\n" in after


def test_the_sweeper_gives_back_what_was_begun_for_claims_that_are_gone(kit):
    async def story():
        await kit.boot()
        gone, there = await kit.claim("gone"), await kit.claim("there", "toy-1")
        for name in ("gone", "there"):
            kit.toys.trouble[name] = Retry("not yet", after=0.0)
        async with kit.plugin() as process:
            await process.requests.prepare([gone.ref, there.ref], 0.2)
            await kit.api.delete(RESOURCE_CLAIM, "gone", "default")
            del kit.toys.trouble["gone"]
            orphan = kit.places.cdi / f"k8s.{kit.driver}-claim_nobody.yaml"
            orphan.write_text("{}")
            await process.sweeper.sweep()
            assert kit.toys.unprepared == [gone.uid]
            assert not orphan.exists()
            assert process.checkpoint.claims[there.uid].state == "PrepareStarted"
            kit.now += 91
            await process.sweeper.sweep()
            assert gone.uid not in process.checkpoint.claims

    asyncio.run(story())


def test_a_claim_that_went_during_a_reboot_is_given_back_soon_after_the_api_server_answers(kit, monkeypatch):
    away = 25.0

    async def story():
        await kit.boot()
        claim = await kit.claim("c1")
        kit.places.home(kit.driver).mkdir(parents=True)
        await PluginProcess(kit.toys, kit.api, kit.host()).requests.prepare([claim.ref])
        await kit.api.delete(RESOURCE_CLAIM, "c1", "default")
        kit.boot_id = "boot-2"
        plugin_process = PluginProcess(kit.toys, kit.api, kit.host())
        loop = asyncio.get_running_loop()
        booted = loop.time()
        get = kit.api.get

        async def unreachable_at_first(*wanted):
            if loop.time() < booted + away:
                raise KubeError(0, "", "no route to host")
            return await get(*wanted)

        monkeypatch.setattr(kit.api, "get", unreachable_at_first)
        async with beside(plugin_process.sweeper.run()):
            await asyncio.sleep(away + 15)
        assert kit.toys.unprepared == [claim.uid]

    virtual(1, story)


@pytest.mark.parametrize("socket_of_theirs", ["dra.sock", "{driver}-reg.sock", "{driver}-8f1c-reg.sock"])
def test_a_driver_of_another_project_keeps_its_sockets_and_slices(kit, socket_of_theirs):
    """It holds no lock of Rackloom. The last name is of a driver with two releases that may run at a time."""
    home = kit.places.plugins / kit.driver
    folder = home if socket_of_theirs == "dra.sock" else kit.places.registry
    theirs = folder / socket_of_theirs.format(driver=kit.driver)

    async def story():
        await kit.boot()
        published = {"metadata": {"name": "theirs"}, "spec": their_slice(kit)}
        await kit.api.create(RESOURCE_SLICE, published)
        before = (await kit.api.list(RESOURCE_SLICE)).items
        for directory in (home, kit.places.registry):
            directory.mkdir(parents=True, exist_ok=True)
        with socket.socket(socket.AF_UNIX) as server:
            server.bind(str(theirs))
            server.listen()
            with pytest.raises(Refused, match=f"another driver serves {kit.driver} on this node: .*{theirs}"):
                async with kit.plugin():
                    pass
            with socket.socket(socket.AF_UNIX) as client:
                client.connect(str(theirs))
        assert (await kit.api.list(RESOURCE_SLICE)).items == before
        # It was killed, and left the socket, which blocks no other plugin.
        async with kit.plugin():
            pass

    asyncio.run(story())


def their_slice(kit):
    pool = {"name": kit.node, "generation": 7, "resourceSliceCount": 1}
    return {"driver": kit.driver, "nodeName": kit.node, "pool": pool, "devices": [{"name": "toy-0"}]}
