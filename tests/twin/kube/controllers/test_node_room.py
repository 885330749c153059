"""What pods take of nodes, as kube-scheduler counts it."""

from fractions import Fraction
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from rackloom.twin.kube.controllers.node_room import NOTHING, Amounts, has_room, minus, needs, plus

GPU = "nvidia.com/gpu"
AMOUNTS = st.dictionaries(st.sampled_from(["cpu", "memory", GPU]), st.fractions(0, 9), max_size=3)


def container(gpus: object, **more: str) -> dict[str, Any]:
    return {"resources": {"limits": {GPU: gpus}}} | more


def node(**room: str) -> dict[str, Any]:
    return {"status": {"allocatable": room}}


def gpus_of(*containers: dict[str, Any], before: tuple[dict[str, Any], ...] = (), **more: Any) -> Fraction:
    return needs({"containers": list(containers), "initContainers": list(before)} | more)[GPU]


def test_units_of_kubernetes_are_read() -> None:
    requests = {"cpu": "1500m", "memory": "2Ki", GPU: "1k"}
    spec = {"containers": [{"resources": {"requests": requests}}]}
    assert needs(spec) == {"cpu": Fraction(3, 2), "memory": 2048, GPU: 1000, "pods": 1}


def test_containers_run_together_and_init_containers_before_them() -> None:
    sidecar = container(1, restartPolicy="Always")
    assert gpus_of(container(1), container("2")) == 3
    assert gpus_of(container(1), before=(container(4), container(2))) == 4
    assert gpus_of(container(3), before=(sidecar, container(1))) == 4
    assert gpus_of(container(1), before=(sidecar, container(4))) == 5
    assert gpus_of(container(1), before=(container(4), sidecar)) == 4
    assert gpus_of(container(1), overhead={GPU: 2}) == 3


def test_what_the_whole_pod_asks_for_counts_for_its_containers() -> None:
    one = {"resources": {"requests": {"cpu": "1"}}}
    assert needs({"containers": [one], "resources": {"requests": {"cpu": "4"}}})["cpu"] == 4


def test_what_a_node_does_not_name_it_does_not_have() -> None:
    one_pod = needs({"containers": []})
    assert has_room(node(pods="1"), one_pod, NOTHING)
    assert not has_room(node(), one_pod, NOTHING)
    assert not has_room(node(pods="1"), one_pod, one_pod)
    assert has_room(node(pods="1"), needs({"containers": [container("0")]}), NOTHING)


def test_what_cannot_be_read_fits_nowhere() -> None:
    assert not has_room(node(pods="9", **{GPU: "9Ti"}), needs({"containers": [container("half")]}), NOTHING)


@given(AMOUNTS, AMOUNTS)
def test_what_goes_leaves_what_was_there(one: Amounts, other: Amounts) -> None:
    left = minus(plus(one, other), other)
    assert {name: amount for name, amount in left.items() if amount} == {
        name: amount for name, amount in one.items() if amount
    }
