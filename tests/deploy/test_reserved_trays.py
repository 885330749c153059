"""The policy that keeps pods off reserved trays: the expressions of the manifest, evaluated here."""

from pathlib import Path

import pytest
import yaml
from cel_expr_python import cel
from cel_expr_python.ext import ext_optional

from rackloom.core.cluster.gang_objects import GANG_TAINT

GANGS = Path(__file__).parents[2] / "deploy" / "kubernetes" / "base" / "gangs.yaml"
CONTROLLER = "system:serviceaccount:rackloom-system:rackloom-controller"
(SPEC,) = [
    obj["spec"]
    for obj in yaml.safe_load_all(GANGS.read_text())
    if obj["kind"] == "ValidatingAdmissionPolicy" and obj["metadata"]["name"] == "rackloom-reserved-trays"
]

MAY_BIND = "mayBind"
"""The variable that the API server gets from its authorizer: given here, real in tests/cluster."""
NAMED = {"key": GANG_TAINT, "operator": "Exists"}
VALUED = {
    "key": GANG_TAINT,
    "operator": "Equal",
    "value": "uid-of-a-plan",
    "effect": "NoSchedule",
}
ALL = {"operator": "Exists"}
STATIC = {"operator": "Exists", "effect": "NoExecute"}
GPU = {"key": "nvidia.com/gpu", "operator": "Exists", "effect": "NoSchedule"}


def on_node(obj, **annotations):
    metadata = {**obj["metadata"], "annotations": annotations}
    return {"metadata": metadata, "spec": {**obj["spec"], "nodeName": "n1"}}


def pod(*tolerations, gpus=0, claims=(), init=False, **amounts):
    limits = {
        "resources": {"limits": {"cpu": "1"} | ({"nvidia.com/gpu": str(gpus)} if gpus else {})} | amounts
    }
    spec = {"containers": [{"name": "main"} | ({} if init else limits)]}
    spec |= {"initContainers": [{"name": "first"} | limits]} if init else {}
    spec |= {"tolerations": list(tolerations)} if tolerations else {}
    return {"metadata": {"name": "p"}, "spec": spec | ({"resourceClaims": list(claims)} if claims else {})}


def is_allowed(obj, before=None, user="alice", namespace="team", groups=(), may_bind=False):
    asked = {
        "operation": "CREATE" if before is None else "UPDATE",
        "namespace": namespace,
        "userInfo": {"username": user, "groups": ["system:authenticated", *groups]},
    }
    data = {"object": obj, "oldObject": before, "request": asked, "variables": {}}
    types = dict.fromkeys(data, cel.Type.DYN)
    environment = cel.NewEnv(variables=types, extensions=[ext_optional.ExtOptional()])

    def value_of(expression):
        found = environment.compile(expression).eval(data=data)
        assert found.type() != cel.Type.ERROR, (expression, found)
        return found.plain_value()

    if not all(value_of(condition["expression"]) for condition in SPEC["matchConditions"]):
        return True
    data["variables"] = {MAY_BIND: may_bind}
    for variable in (known for known in SPEC["variables"] if known["name"] != MAY_BIND):
        data["variables"] = data["variables"] | {variable["name"]: value_of(variable["expression"])}
    return all(value_of(validation["expression"]) for validation in SPEC["validations"])


@pytest.mark.parametrize("toleration", [NAMED, VALUED, NAMED | {"effect": "NoSchedule"}])
def test_nobody_tolerates_the_taint_of_gangs_by_himself(toleration):
    assert not is_allowed(pod(toleration))
    assert not is_allowed(pod(GPU, toleration, gpus=4))
    assert not is_allowed(pod(GPU, toleration), before=pod(GPU)), "nor later"


def test_the_controller_and_the_system_do():
    assert is_allowed(pod(GPU, VALUED, gpus=4), before=pod(GPU, gpus=4), user=CONTROLLER)
    for namespace in ("kube-system", "rackloom-system"):
        assert is_allowed(pod(NAMED, ALL, gpus=4), namespace=namespace)


def test_pods_that_were_let_go_are_updated_by_others():
    assert is_allowed(pod(GPU, VALUED, gpus=4), before=pod(GPU, VALUED, gpus=4))


def test_who_takes_devices_does_not_tolerate_everything():
    claim = {"name": "gpu", "resourceClaimTemplateName": "gpu"}
    for devices in ({"gpus": 1}, {"claims": [claim]}, {"gpus": 1, "init": True}):
        assert not is_allowed(pod(ALL, **devices))
        assert not is_allowed(pod(ALL | {"effect": "NoSchedule"}, **devices))
        assert is_allowed(pod(STATIC, GPU, **devices)), "taints that do not keep new pods away"


@pytest.mark.parametrize("which", ["limits", "requests"])
def test_any_device_class_may_stand_behind_an_extended_resource(which):
    for device in ("deviceclass.resource.kubernetes.io/gpu.nvidia.com", "example.com/gpu", "rdma/hca"):
        assert not is_allowed(pod(ALL, **{which: {"cpu": "1", device: 1}}))
        assert not is_allowed(pod(ALL, init=True, **{which: {device: 1}}))
        assert is_allowed(pod(GPU, **{which: {device: 1}}))
    for plain in ("memory", "hugepages-2Mi", "ephemeral-storage", "kubernetes.io/batch-cpu"):
        assert is_allowed(pod(ALL, **{which: {plain: 1}}))


def test_pods_that_look_after_nodes_and_plain_pods_are_let_be():
    assert is_allowed(pod(ALL))
    assert is_allowed(pod())
    assert is_allowed(pod(GPU, gpus=4))


def test_nobody_makes_a_pod_with_its_node_but_who_may_bind_pods():
    for made in (pod(), pod(gpus=4), pod(GPU, gpus=4), pod(ALL)):
        assert is_allowed(made)
        assert not is_allowed(on_node(made))
        assert is_allowed(on_node(made), may_bind=True)
        assert is_allowed(on_node(made), before=on_node(made)), "the scheduler bound it, somebody labels it"
    assert is_allowed(on_node(pod(gpus=4)), namespace="kube-system")
    assert not is_allowed(pod(NAMED), may_bind=True), "that opens nothing else"


def test_kubelets_mirror_their_static_pods_and_nobody_else_does():
    mirror = on_node(pod(), **{"kubernetes.io/config.mirror": "hash"})
    assert is_allowed(mirror, user="system:node:n1", groups=["system:nodes"])
    assert not is_allowed(mirror), "anybody may write an annotation"
    assert not is_allowed(on_node(pod()), user="system:node:n1", groups=["system:nodes"])


def test_it_denies():
    bindings = [obj for obj in yaml.safe_load_all(GANGS.read_text()) if obj["kind"].endswith("PolicyBinding")]
    (ours,) = [binding for binding in bindings if binding["spec"]["policyName"] == "rackloom-reserved-trays"]
    assert ours["spec"]["validationActions"] == ["Deny"]
