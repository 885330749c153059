"""The resources that pods take from nodes, as kube-scheduler counts them."""

from fractions import Fraction
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rackloom.core.cluster import scheduling
from rackloom.core.cluster.nodes import NodeObject, read_node
from rackloom.core.cluster.pods import read_pod
from rackloom.core.cluster.scheduling import NO_AMOUNTS, ResourceAmounts
from rackloom.lab.kube.controllers.scheduler import fits_node

GPU = "nvidia.com/gpu"
AMOUNTS = st.dictionaries(st.sampled_from(["cpu", "memory", GPU]), st.fractions(0, 9), max_size=3).map(
    ResourceAmounts
)


def container(gpus: object, **more: str) -> dict[str, Any]:
    return {"resources": {"limits": {GPU: gpus}}} | more


def node(**room: str) -> NodeObject:
    return read_node({"metadata": {"name": "n"}, "status": {"allocatable": room}})


def pod_requests(spec: dict[str, Any]) -> ResourceAmounts:
    return scheduling.pod_requests(read_pod({"spec": spec}).spec)


def gpus_of(*containers: dict[str, Any], before: tuple[dict[str, Any], ...] = (), **more: Any) -> Fraction:
    return pod_requests({"containers": list(containers), "initContainers": list(before)} | more)[GPU]


def test_units_of_kubernetes_are_read() -> None:
    requests = {"cpu": "1500m", "memory": "2Ki", GPU: "1k"}
    spec = {"containers": [{"resources": {"requests": requests}}]}
    assert pod_requests(spec) == {"cpu": Fraction(3, 2), "memory": 2048, GPU: 1000, "pods": 1}


def test_containers_run_together_and_init_containers_before_them() -> None:
    sidecar = container(1, restartPolicy="Always")
    assert gpus_of(container(1), container("2")) == 3
    assert gpus_of(container(1), before=(container(4), container(2))) == 4
    assert gpus_of(container(3), before=(sidecar, container(1))) == 4
    assert gpus_of(container(1), before=(sidecar, container(4))) == 5
    assert gpus_of(container(1), before=(container(4), sidecar)) == 4
    assert gpus_of(container(1), overhead={GPU: 2}) == 3


def test_what_the_whole_pod_asks_for_counts_for_its_containers() -> None:
    part = {"resources": {"requests": {"cpu": "1"}}}
    assert pod_requests({"containers": [part], "resources": {"requests": {"cpu": "4"}}})["cpu"] == 4


def test_what_a_node_does_not_name_it_does_not_have() -> None:
    one_pod = pod_requests({"containers": []})
    assert fits_node(node(pods="1"), one_pod, NO_AMOUNTS)
    assert not fits_node(node(), one_pod, NO_AMOUNTS)
    assert not fits_node(node(pods="1"), one_pod, one_pod)
    assert fits_node(node(pods="1"), pod_requests({"containers": [container("0")]}), NO_AMOUNTS)


def test_an_amount_that_cannot_be_read_is_refused() -> None:
    with pytest.raises(ValueError, match="is 'half', and not a quantity"):
        pod_requests({"containers": [container("half")]})


@given(AMOUNTS, AMOUNTS)
def test_what_goes_leaves_what_was_there(here: ResourceAmounts, other: ResourceAmounts) -> None:
    assert here + other - other == here
