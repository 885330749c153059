"""Pods of gangs are gated once, and pods that can never be placed are denied early."""

import pytest

from rackloom.claim.cluster.admission.channel_pods import ClaimTemplateState, PodContext, mutate_pod
from rackloom.claim.cluster.admission.webhook import hold_gang_pod
from rackloom.core.cluster.gang_objects import GANG_GATE, GROUP_LABEL
from rackloom.core.cluster.pods import GANG_LABEL, SIZE_ANNOTATION, PodObject, decode_object
from rackloom.lab.kube.patches import json_patch


def pod(size="18", *, labels=None, **spec):
    annotations = {} if size is None else {SIZE_ANNOTATION: size}
    meta = {"name": "p", "labels": {GANG_LABEL: "big", **(labels or {})}, "annotations": annotations}
    return {"metadata": meta, "spec": {"containers": [{"name": "main"}], **spec}}


def gates(obj):
    return [gate["name"] for gate in obj["spec"].get("schedulingGates", ())]


def held(obj):
    _, verdict = hold_gang_pod(decode_object(obj, PodObject))
    assert verdict.allowed, verdict.message
    return json_patch(obj, verdict.patch)


@pytest.mark.parametrize("before", [None, [], [{"name": "other"}]])
def test_a_pod_of_a_gang_is_held_and_keeps_other_gates(before):
    obj = pod() if before is None else pod(schedulingGates=before)
    done = held(obj)
    assert gates(done) == [*gates(obj), GANG_GATE]
    assert held(done) == done, "twice is as good as once"


def test_a_pod_that_waits_for_its_claim_template_too_has_both_gates():
    claims = [{"name": "channel", "resourceClaimTemplateName": "imex"}]
    obj = pod(resourceClaims=claims)
    now, verdict = hold_gang_pod(decode_object(obj, PodObject))
    both = verdict.and_then(mutate_pod(now, PodContext({"imex": ClaimTemplateState()}, {})))
    assert gates(json_patch(obj, both.patch)) == [GANG_GATE, "rackloom.dev/claim-template"]


def test_pods_of_no_gang_and_bound_pods_are_left_alone():
    plain = pod()
    plain["metadata"]["labels"] = {}
    assert held(plain) == plain
    bound = pod(nodeName="n1")
    assert held(bound) == bound


def test_a_gang_without_a_size_is_somebody_elses_and_its_owner_is_warned():
    _, verdict = hold_gang_pod(decode_object(pod(None), PodObject))
    assert (verdict.allowed, verdict.patch) == (True, ())
    assert "rackloom.dev/gang-size as 18" in verdict.warnings[0]


@pytest.mark.parametrize(
    ("obj", "message"),
    [
        (pod(""), "launcher=1,worker=18"),
        (pod("many"), "launcher=1,worker=18"),
        (pod("0"), "launcher=1,worker=18"),
        (pod("a=1,a=2"), "launcher=1,worker=18"),
        (pod("a=1,B=2"), "launcher=1,worker=18"),
        (pod("launcher=1,worker=18"), "set label rackloom.dev/gang-group to launcher or worker"),
        (pod("launcher=1", labels={GROUP_LABEL: "worker"}), "to launcher"),
        (pod(labels={GANG_LABEL: "Big_1"}), "lower-case letters"),
    ],
)
def test_what_could_never_be_placed_is_denied_with_what_to_write(obj, message):
    _, verdict = hold_gang_pod(decode_object(obj, PodObject))
    assert not verdict.allowed
    assert message in verdict.message
