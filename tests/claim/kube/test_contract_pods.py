"""An API server's contract with Rackloom: pods."""

from typing import Any

import pytest
from tests.claim.kube.world import Play, World, create_pod, is_gone, pod, refused

from rackloom.claim.kube.api import Rejected
from rackloom.core.cluster import objects
from rackloom.core.cluster.objects import Object

GATES = [{"name": "rackloom.test/hold"}]
FROZEN = "pod updates may not change fields other than"


def asks(key: str, *values: str) -> Object:
    return {"key": key, "operator": "In", "values": list(values)}


def steered(*terms: list[Object], **more: Any) -> Object:
    """A patch that gives a pod these alternatives of nodes."""
    required = {"nodeSelectorTerms": [{"matchExpressions": term} for term in terms]}
    affinity = {"requiredDuringSchedulingIgnoredDuringExecution": required} | more
    return {"spec": {"affinity": {"nodeAffinity": affinity}}}


async def change(world: World, spec: Object, name: str = "a") -> Object:
    return await world.api.patch(objects.POD, name, world.namespace, spec)


async def is_refused(world: World, patch: Object, *whys: str, name: str = "a") -> None:
    with pytest.raises(Rejected) as error:
        await change(world, patch, name)
    code, reason, message = refused(error)
    assert (code, reason) == (422, "Invalid")
    assert message.startswith(f'Pod "{name}" is invalid: ')
    for why in whys:
        assert why in message


def test_a_gated_pod_says_why_it_waits(play: Play) -> None:
    async def scenario(world: World) -> None:
        made = await create_pod(world, pod(world, "a", schedulingGates=GATES))
        assert made["status"]["phase"] == "Pending"
        (condition,) = made["status"]["conditions"]
        reported = (condition["type"], condition["status"], condition["reason"])
        assert reported == ("PodScheduled", "False", "SchedulingGated")

    play(scenario)


def test_gates_are_only_taken_away(play: Play) -> None:
    async def scenario(world: World) -> None:
        await create_pod(world, pod(world, "a", schedulingGates=GATES))
        more = {"spec": {"schedulingGates": [*GATES, {"name": "rackloom.test/more"}]}}
        why = "only deletion is allowed, but found new scheduling gate 'rackloom.test/more'"
        await is_refused(world, more, f"spec.schedulingGates[1].name: Forbidden: {why}")
        await change(world, {"spec": {"schedulingGates": None}})
        await is_refused(world, {"spec": {"schedulingGates": GATES}}, "only deletion is allowed")

    play(scenario)


def test_a_gated_pod_has_no_node(play: Play) -> None:
    async def scenario(world: World) -> None:
        await create_pod(world, pod(world, "a", schedulingGates=GATES))
        with pytest.raises(Rejected) as error:
            await world.api.create(objects.POD, pod(world, "b", schedulingGates=GATES, nodeName="n"))
        message = (
            'Pod "b" is invalid: spec.nodeName: Forbidden: cannot be set until all schedulingGates have been'
        )
        assert refused(error) == (422, "Invalid", f"{message} cleared")

    play(scenario)


def test_a_gated_pod_is_selected_more_narrowly(play: Play) -> None:
    async def scenario(world: World) -> None:
        await create_pod(world, pod(world, "a", schedulingGates=GATES, nodeSelector={"k": "v"}))
        why = "only additions to spec.nodeSelector are allowed (no mutations or deletions)"
        other = 'spec.nodeSelector: Invalid value: {"k":"w"}: '
        await is_refused(world, {"spec": {"nodeSelector": {"k": "w"}}}, other + why)
        none = "spec.nodeSelector: Invalid value: {}: "
        await is_refused(world, {"spec": {"nodeSelector": {"k": None}}}, none + why)
        changed = await change(world, {"spec": {"nodeSelector": {"l": "w"}}})
        assert changed["spec"]["nodeSelector"] == {"k": "v", "l": "w"}

    play(scenario)


def test_a_gated_pod_is_steered_more_narrowly(play: Play) -> None:
    async def scenario(world: World) -> None:
        await create_pod(world, pod(world, "a", schedulingGates=GATES))
        a, b = asks("a", "1"), asks("b", "1")
        await change(world, steered([a], [a, b]))
        many = "no additions/deletions to non-empty NodeSelectorTerms list are allowed"
        await is_refused(world, steered([a]), many)
        await is_refused(world, steered([a], [a, b], [b]), many)
        await is_refused(world, {"spec": {"affinity": None}}, many)
        only = "only additions are allowed (no mutations or deletions)"
        await is_refused(
            world, steered([asks("a", "1", "2")], [a, b]), "nodeSelectorTerms[0]: Invalid value: {"
        )
        await is_refused(world, steered([a], [b, a]), "nodeSelectorTerms[1]: ", only)
        preferred = [{"weight": 1, "preference": {"matchExpressions": [b]}}]
        affinity = {"preferredDuringSchedulingIgnoredDuringExecution": preferred}
        await change(world, steered([a, b], [a, b], **affinity))
        changed = await change(
            world, steered([a, b], [a, b], preferredDuringSchedulingIgnoredDuringExecution=[])
        )
        (first, _) = terms(changed)
        assert [expression["key"] for expression in first["matchExpressions"]] == ["a", "b"]

    play(scenario)


def terms(made: Object) -> list[Object]:
    required = made["spec"]["affinity"]["nodeAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"]
    found: list[Object] = required["nodeSelectorTerms"]
    return found


def test_what_no_gate_lets_change(play: Play) -> None:
    near = {"topologyKey": "zone", "labelSelector": {"matchLabels": {"x": "y"}}}
    frozen: list[Object] = [
        {"hostname": "x"},
        {"nodeName": "n"},
        {"terminationGracePeriodSeconds": 5},
        {"resourceClaims": [{"name": "c", "resourceClaimName": "c"}]},
        {"affinity": {"podAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": [near]}}},
    ]

    async def scenario(world: World) -> None:
        await create_pod(world, pod(world, "a", schedulingGates=GATES))
        for spec in frozen:
            await is_refused(world, {"spec": spec}, FROZEN)
        several = {"hostname": "x", "schedulingGates": [{"name": "rackloom.test/other"}]}
        await is_refused(world, {"spec": several}, FROZEN, "found new scheduling gate")
        two = [{"name": name, "image": "none.invalid/none"} for name in ("main", "more")]
        why = "spec.containers: Forbidden: pod updates may not add or remove containers"
        await is_refused(world, {"spec": {"containers": two}}, why)

    play(scenario)


def test_a_pod_without_gates_is_not_steered(play: Play) -> None:
    async def scenario(world: World) -> None:
        await create_pod(world, pod(world, "a", schedulingGates=GATES))
        await change(world, steered([asks("a", "1")]))
        await change(world, {"spec": {"schedulingGates": None}})
        await is_refused(world, {"spec": {"nodeSelector": {"no": "where"}}}, FROZEN)
        await is_refused(world, steered([asks("a", "1"), asks("b", "1")]), FROZEN)

    play(scenario)


def test_the_last_gate_and_the_nodes_go_in_one_change(play: Play) -> None:
    async def scenario(world: World) -> None:
        await create_pod(world, pod(world, "a", schedulingGates=GATES))
        let_go = {"schedulingGates": None, "nodeSelector": {"no": "where"}}
        changed = await change(world, {"spec": let_go})
        assert not changed["spec"].get("schedulingGates")
        assert changed["spec"]["nodeSelector"] == {"no": "where"}

    play(scenario)


def test_tolerations_only_come(play: Play) -> None:
    async def scenario(world: World) -> None:
        mine = {"key": "mine", "operator": "Exists", "effect": "NoExecute", "tolerationSeconds": 5}
        made = await create_pod(world, pod(world, "a", schedulingGates=GATES, tolerations=[mine]))
        unwell = {"operator": "Exists", "effect": "NoExecute", "tolerationSeconds": 300}
        given = [{"key": f"node.kubernetes.io/{why}"} | unwell for why in ("not-ready", "unreachable")]
        assert made["spec"]["tolerations"] == [mine, *given]
        why = "existing toleration can not be modified except its tolerationSeconds"
        await is_refused(world, {"spec": {"tolerations": given}}, why)
        await is_refused(world, {"spec": {"tolerations": [mine | {"effect": "NoSchedule"}]}}, why)
        more = {"key": "more", "operator": "Exists"}
        changed = await change(world, {"spec": {"tolerations": [more, mine | {"tolerationSeconds": 9}]}})
        assert changed["spec"]["tolerations"] == [more, mine | {"tolerationSeconds": 9}, *given]
        await change(world, {"spec": {"schedulingGates": None}})
        last = [*changed["spec"]["tolerations"], {"key": "last", "operator": "Exists"}]
        changed = await change(world, {"spec": {"tolerations": last}})
        assert changed["spec"]["tolerations"] == last

    play(scenario)


def test_who_tolerates_everything_is_given_no_more(play: Play) -> None:
    async def scenario(world: World) -> None:
        all_of_it = [{"operator": "Exists"}]
        made = await create_pod(world, pod(world, "a", schedulingGates=GATES, tolerations=all_of_it))
        assert made["spec"]["tolerations"] == all_of_it

    play(scenario)


def test_a_deadline_only_comes_nearer(play: Play) -> None:
    async def scenario(world: World) -> None:
        await create_pod(world, pod(world, "a", schedulingGates=GATES))
        for seconds in (50, 40):
            await change(world, {"spec": {"activeDeadlineSeconds": seconds}})
        why = "spec.activeDeadlineSeconds: Invalid value: 60: must be less than or equal to previous value"
        await is_refused(world, {"spec": {"activeDeadlineSeconds": 60}}, why)
        why = "must not update from a positive integer to nil value"
        await is_refused(world, {"spec": {"activeDeadlineSeconds": None}}, why)

    play(scenario)


async def bind(world: World, name: str, node: str, **metadata: str) -> tuple[int, Object]:
    place = f"/api/v1/namespaces/{world.namespace}/pods/{name}/binding"
    target = {"apiVersion": "v1", "kind": "Node", "name": node}
    binding = {"apiVersion": "v1", "kind": "Binding", "metadata": {"name": name} | metadata, "target": target}
    answer = await world.http.post(place, json=binding)
    return answer.status_code, answer.json()


def test_a_binding_gives_a_pod_its_node_once(play: Play) -> None:
    async def scenario(world: World) -> None:
        # A real scheduler ignores pods that name another.
        made = await create_pod(world, pod(world, "a", schedulingGates=GATES, schedulerName="nobody"))
        before = made["metadata"]["generation"]
        message = (
            'Operation cannot be fulfilled on pods/binding "a": pod a has non-empty .spec.schedulingGates'
        )
        assert await is_in_conflict(world, "n1", message)
        await change(world, {"spec": {"schedulingGates": None}})
        code, answer = await bind(world, "a", "n1", uid="other")
        assert (code, answer["reason"]) == (409, "Conflict")
        uid = made["metadata"]["uid"]
        assert answer["message"].endswith(f"UID in precondition: other, UID in object meta: {uid}")
        code, answer = await bind(world, "a", "n1", uid=uid)
        assert (code, answer["status"]) == (201, "Success")
        found = await world.api.get(objects.POD, "a", world.namespace)
        assert found["spec"]["nodeName"] == "n1"
        assert found["metadata"]["generation"] == before + 1, "the gate's going counts, the binding does not"
        (condition,) = [entry for entry in found["status"]["conditions"] if entry["type"] == "PodScheduled"]
        assert (condition["status"], condition.get("reason")) == ("True", None)
        message = 'Operation cannot be fulfilled on pods/binding "a": pod a is already assigned to node "n1"'
        assert await is_in_conflict(world, "n2", message)
        code, answer = await bind(world, "b", "n1")
        assert (code, answer["message"]) == (404, 'pods "b" not found')

    play(scenario)


async def is_in_conflict(world: World, node: str, message: str) -> bool:
    code, answer = await bind(world, "a", node)
    return (code, answer["reason"], answer["message"]) == (409, "Conflict", message)


def test_a_pod_on_a_node_has_its_grace_and_any_other_none(play: Play) -> None:
    async def scenario(world: World) -> None:
        await create_pod(world, pod(world, "free", schedulingGates=GATES))
        await world.api.delete(objects.POD, "free", world.namespace)
        assert await is_gone(world, objects.POD, "free")
        await create_pod(world, pod(world, "bound", nodeName="no-such-node"))
        await world.api.delete(objects.POD, "bound", world.namespace)
        left = await world.api.get(objects.POD, "bound", world.namespace)
        assert left["metadata"]["deletionGracePeriodSeconds"] == 30
        await world.api.delete(objects.POD, "bound", world.namespace, grace_seconds=0)
        assert await is_gone(world, objects.POD, "bound")

    play(scenario)
