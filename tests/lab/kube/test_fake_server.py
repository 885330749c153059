"""Extras of the fake server beyond the contract: hooks, faults, counts, rules, and reproducible runs."""

import asyncio
import random
from contextlib import aclosing, suppress

import httpx2
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rackloom.claim.kube.api import Conflict, KubeApi, KubeError, NotFound, Rejected
from rackloom.core.cluster import objects
from rackloom.core.cluster.objects import Object
from rackloom.lab.kube.direct import DirectApi
from rackloom.lab.kube.faults import RequestFault
from rackloom.lab.kube.http import KubeTransport
from rackloom.lab.kube.managed_fields import decode_fields, encode_fields, owned_fields
from rackloom.lab.kube.objects import TYPE_SCHEMAS
from rackloom.lab.kube.server import AdmissionReview, FakeKube
from rackloom.lab.virtual import event_loop


def named(name: str, **more: object) -> Object:
    return {"metadata": {"name": name, "namespace": "default"}, **more}


def test_an_admission_hook_changes_or_refuses() -> None:
    async def run() -> None:
        kube = FakeKube()
        api = DirectApi(kube, "tenant")
        seen: list[tuple[str, str]] = []

        async def hook(review: AdmissionReview) -> Object | None:
            seen.append((review.operation, review.user))
            if review.kind != objects.CONFIG_MAP or review.object is None:
                return None
            if review.object.get("data", {}).get("bad"):
                raise Rejected(403, "Forbidden", "no bad data here")
            await asyncio.sleep(0.01)
            review.object["data"] = {**review.object.get("data", {}), "by": "webhook"}
            return review.object

        kube.admission.append(hook)
        made = await api.create(objects.CONFIG_MAP, named("a"))
        assert made["data"] == {"by": "webhook"}
        with pytest.raises(Rejected, match="no bad data"):
            await api.patch(objects.CONFIG_MAP, "a", "default", {"data": {"bad": "1"}})
        await api.delete(objects.CONFIG_MAP, "a", "default")
        assert seen == [("CREATE", "tenant"), ("UPDATE", "tenant"), ("DELETE", "tenant")]

    event_loop.run_simulation(0, run)


def test_a_change_that_admission_delayed_does_not_undo_another() -> None:
    async def run() -> None:
        kube = FakeKube()
        rng = random.Random(0)

        async def slow(_: AdmissionReview) -> None:
            await asyncio.sleep(rng.random())

        await DirectApi(kube, "x").create(objects.CONFIG_MAP, named("a"))
        kube.admission.append(slow)

        async def add(number: int) -> None:
            api = DirectApi(kube, f"u{number}")
            for _ in range(50):
                with suppress(Conflict):
                    await api.patch(objects.CONFIG_MAP, "a", "default", {"data": {f"k{number}": "1"}})
                    return

        await asyncio.gather(*(add(number) for number in range(8)))
        found = await DirectApi(kube, "x").get(objects.CONFIG_MAP, "a", "default")
        assert len(found["data"]) == 8

    event_loop.run_simulation(0, run)


def test_a_lost_reply_was_carried_out_and_a_lost_request_was_not() -> None:
    async def run() -> None:
        kube = FakeKube()
        api = DirectApi(kube, "x")
        kube.faults.add(RequestFault(verb="create", lost="reply"))
        with pytest.raises(KubeError) as error:
            await api.create(objects.CONFIG_MAP, named("a"))
        assert error.value.code == 0
        kube.faults.clear()
        assert await api.get(objects.CONFIG_MAP, "a", "default")
        kube.faults.add(RequestFault(verb="create", code=429, reason="TooManyRequests", retry_after=3.0))
        with pytest.raises(KubeError) as error:
            await api.create(objects.CONFIG_MAP, named("b"))
        assert (error.value.code, error.value.retry_after) == (429, 3.0)
        with pytest.raises(NotFound):
            await api.get(objects.CONFIG_MAP, "b", "default")

    event_loop.run_simulation(0, run)


def test_calls_are_counted_and_take_the_time_they_are_said_to() -> None:
    async def run() -> None:
        kube, loop = FakeKube(), asyncio.get_running_loop()
        kube.faults.delay(0.005)
        kube.faults.delay(1.0, verb="list", resource="configmaps")
        api = DirectApi(kube, "x")
        await api.create(objects.CONFIG_MAP, named("a"))
        assert loop.time() == pytest.approx(0.005)
        await api.list(objects.CONFIG_MAP)
        assert loop.time() == pytest.approx(1.005)
        assert kube.writes("x") == kube.writes() == 1
        assert kube.writes("y") == 0

    event_loop.run_simulation(0, run)


def test_a_quiet_watch_gets_bookmarks_and_ends() -> None:
    async def run() -> None:
        kube = FakeKube(bookmark_seconds=10.0, watch_seconds=35.0)
        api = DirectApi(kube, "x")
        version = (await api.list(objects.CONFIG_MAP)).resource_version
        await api.create(objects.SECRET, named("s"))
        async with aclosing(api.watch(objects.CONFIG_MAP, resource_version=version)) as events:
            seen = [event async for event in events]
        assert [event.type for event in seen] == ["BOOKMARK"] * 3
        assert asyncio.get_running_loop().time() == pytest.approx(35.0)
        assert int(seen[0].object["metadata"]["resourceVersion"]) > int(version)

    event_loop.run_simulation(0, run)


def test_what_happens_while_a_watch_tells_what_is_there_is_told_after_it() -> None:
    async def run() -> None:
        api = DirectApi(FakeKube(), "x")
        await api.create(objects.CONFIG_MAP, named("a"))
        async with aclosing(api.watch(objects.CONFIG_MAP, resource_version="")) as events:
            first = await anext(events)
            await api.create(objects.CONFIG_MAP, named("b"))
            second = await anext(events)
        assert [event.object["metadata"]["name"] for event in (first, second)] == ["a", "b"]

    event_loop.run_simulation(0, run)


def test_a_namespace_takes_what_is_in_it_along() -> None:
    async def run() -> None:
        api = DirectApi(FakeKube(), "x")
        held = named("held")
        held["metadata"]["finalizers"] = ["x/y"]
        await api.create(objects.CONFIG_MAP, held)
        await api.create(objects.CONFIG_MAP, named("free"))
        await api.delete(objects.NAMESPACE, "default")
        await asyncio.sleep(1)
        with pytest.raises(Rejected, match="being terminated"):
            await api.create(objects.CONFIG_MAP, named("late"))
        assert [item["metadata"]["name"] for item in (await api.list(objects.CONFIG_MAP)).items] == ["held"]
        await api.patch(objects.CONFIG_MAP, "held", "default", {"metadata": {"finalizers": None}})
        await asyncio.sleep(1)
        with pytest.raises(NotFound):
            await api.get(objects.NAMESPACE, "default")

    event_loop.run_simulation(0, run)


def test_a_definition_takes_its_objects_along() -> None:
    async def run() -> None:
        kube = FakeKube()
        api = DirectApi(kube, "tenant")
        name = f"{objects.COMPUTE_DOMAIN.plural}.{objects.COMPUTE_DOMAIN.group}"
        await api.create(objects.CRD, {"metadata": {"name": name}})
        held = {"metadata": {"name": "held", "namespace": "default", "finalizers": ["example.com/f"]}}
        await api.create(objects.COMPUTE_DOMAIN, held)
        await api.create(objects.COMPUTE_DOMAIN, named("free"))
        await api.delete(objects.CRD, name)
        await asyncio.sleep(1)
        (left,) = (await api.list(objects.COMPUTE_DOMAIN)).items
        assert left["metadata"]["name"] == "held"
        assert "deletionTimestamp" in left["metadata"]
        assert "deletionTimestamp" in (await api.get(objects.CRD, name))["metadata"]
        await api.patch(objects.COMPUTE_DOMAIN, "held", "default", {"metadata": {"finalizers": None}})
        await asyncio.sleep(1)
        assert not (await api.list(objects.COMPUTE_DOMAIN)).items
        assert not (await api.list(objects.CRD)).items

    event_loop.run_simulation(0, run)


def test_a_pod_on_a_node_gets_its_grace_and_any_other_goes_at_once() -> None:
    async def run() -> None:
        api = DirectApi(FakeKube(), "x")
        await api.create(objects.POD, named("bound", spec={"nodeName": "n", "containers": []}))
        await api.create(objects.POD, named("free", spec={"containers": []}))
        for name in ("bound", "free"):
            await api.delete(objects.POD, name, "default")
        (pod,) = (await api.list(objects.POD)).items
        assert pod["metadata"]["deletionGracePeriodSeconds"] == 30
        assert pod["metadata"]["deletionTimestamp"] == "2026-01-01T00:00:30Z"
        await api.delete(objects.POD, "bound", "default", grace_seconds=0)
        assert not (await api.list(objects.POD)).items

    event_loop.run_simulation(0, run)


def test_specs_that_must_not_change_do_not() -> None:
    async def run() -> None:
        api = DirectApi(FakeKube(), "x")
        spec = {"channel": {"resourceClaimTemplate": {"name": "t"}}}
        made = await api.create(objects.COMPUTE_DOMAIN, named("d", spec=spec))
        assert made["spec"]["channel"]["allocationMode"] == "Single"
        with pytest.raises(Rejected, match=r"A computeDomain\.spec is immutable"):
            await api.patch(objects.COMPUTE_DOMAIN, "d", "default", {"spec": {"numNodes": 2}})
        gated = {"containers": [{"name": "a", "image": "x"}], "schedulingGates": [{"name": "g"}]}
        await api.create(objects.POD, named("p", spec=gated))
        await api.patch(
            objects.POD, "p", "default", {"spec": {"nodeSelector": {"a": "b"}, "schedulingGates": []}}
        )
        with pytest.raises(Rejected, match="pod updates may not change fields"):
            await api.patch(objects.POD, "p", "default", {"spec": {"nodeSelector": {"a": "c"}}})
        with pytest.raises(Rejected, match="only deletion is allowed"):
            await api.patch(objects.POD, "p", "default", {"spec": {"schedulingGates": [{"name": "new"}]}})

    event_loop.run_simulation(0, run)


NAMES = st.sampled_from("abc")
STEPS = st.lists(
    st.tuples(
        st.sampled_from(["create", "apply", "force", "patch", "status", "delete"]),
        NAMES,
        st.dictionaries(NAMES, st.integers(0, 2), max_size=3),
        st.sampled_from(["m", "n"]),
    ),
    max_size=30,
)


async def step(api: KubeApi, what: str, name: str, values: dict[str, int], manager: str) -> None:
    nodes = [{"name": key, "index": value} for key, value in values.items()]
    obj = named(name, spec=dict(values), status={"nodes": nodes})
    match what:
        case "create":
            await api.create(objects.COMPUTE_DOMAIN_CLIQUE, obj)
        case "apply" | "force":
            daemons = [{"nodeName": key, "index": value} for key, value in values.items()]
            clique = named(name, daemons=daemons)
            await api.apply(objects.COMPUTE_DOMAIN_CLIQUE, clique, manager=manager, force=what == "force")
        case "patch":
            await api.patch(objects.COMPUTE_DOMAIN_CLIQUE, name, "default", {"spec": values})
        case "delete":
            await api.delete(objects.COMPUTE_DOMAIN_CLIQUE, name, "default")
        case _:
            await api.patch(objects.COMPUTE_DOMAIN_CLIQUE, name, "default", {"status": {"nodes": nodes}})


@given(steps=STEPS)
def test_every_owned_field_is_there_and_an_apply_sets_what_it_says(
    steps: list[tuple[str, str, dict[str, int], str]],
) -> None:
    async def run() -> None:
        kube = FakeKube()
        shape = TYPE_SCHEMAS[objects.COMPUTE_DOMAIN_CLIQUE]
        for what, name, values, manager in steps:
            applied = False
            with suppress(KubeError):
                await step(DirectApi(kube, manager), what, name, values, manager)
                applied = what in ("apply", "force")
            for obj in kube.store.all(objects.COMPUTE_DOMAIN_CLIQUE):
                present = owned_fields(obj, shape)
                for entry in obj["metadata"]["managedFields"]:
                    assert decode_fields(entry["fieldsV1"]) <= present
                    assert encode_fields(decode_fields(entry["fieldsV1"])) == entry["fieldsV1"]
            if applied:
                found = kube.store.read(objects.COMPUTE_DOMAIN_CLIQUE, ("default", name))
                # If a manager takes an index from another and releases it, the other's entry has none.
                indexes = {daemon["nodeName"]: daemon.get("index") for daemon in found.get("daemons") or ()}
                assert values.items() <= indexes.items()
            assert what != "force" or applied

    event_loop.run_simulation(0, run)


@given(steps=STEPS, seed=st.integers(0, 100))
def test_a_watch_from_the_start_retells_the_store(
    steps: list[tuple[str, str, dict[str, int], str]], seed: int
) -> None:
    async def run() -> None:
        kube = FakeKube(seed=seed)
        version = (await DirectApi(kube, "x").list(objects.COMPUTE_DOMAIN_CLIQUE)).resource_version
        for what, name, values, manager in steps:
            with suppress(KubeError):
                await step(DirectApi(kube, manager), what, name, values, manager)
        seen: dict[str, Object] = {}
        kube.watch_seconds = 1.0
        kube.bookmark_seconds = 0.5
        async for event in DirectApi(kube, "x").watch(
            objects.COMPUTE_DOMAIN_CLIQUE, resource_version=version
        ):
            if event.type == "BOOKMARK":
                continue
            assert (event.type == "ADDED") is (event.object["metadata"]["name"] not in seen)
            seen[event.object["metadata"]["name"]] = event.object
            if event.type == "DELETED":
                del seen[event.object["metadata"]["name"]]
        assert [seen[key] for key in sorted(seen)] == kube.store.all(objects.COMPUTE_DOMAIN_CLIQUE)

    event_loop.run_simulation(seed, run)


def test_a_run_is_a_function_of_its_seed() -> None:
    async def run() -> str:
        kube = FakeKube(seed=3)
        kube.faults.delay(0.0, 1.0)
        kube.faults.add(RequestFault(rate=0.3))
        for number in range(20):
            with suppress(KubeError):
                await DirectApi(kube, "x").create(
                    objects.CONFIG_MAP,
                    {"metadata": {"generateName": "a-", "namespace": "default"}, "data": {"n": str(number)}},
                )
        return repr(kube.store.all(objects.CONFIG_MAP))

    assert event_loop.run_simulation(3, run) == event_loop.run_simulation(3, run)


def test_a_body_that_is_no_json_is_refused_by_its_format() -> None:
    async def story(kube: FakeKube) -> httpx2.Response:
        async with httpx2.AsyncClient(transport=KubeTransport(kube), base_url="http://fake.invalid") as http:
            kind = {"Content-Type": "application/vnd.kubernetes.protobuf"}
            return await http.post("/api/v1/namespaces", content=b"k8s\x00", headers=kind)

    answer = event_loop.run_simulation(1, lambda: story(FakeKube(seed=1)))
    assert (answer.status_code, answer.json()["reason"]) == (415, "UnsupportedMediaType")
    assert "reads JSON (kubectl create -f, kubectl apply)" in answer.json()["message"]
