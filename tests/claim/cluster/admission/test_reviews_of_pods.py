"""Reviews of new pods: fields are added once and not twice, and problems are reported."""

import contextlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rackloom.claim.cluster.admission.channel_pods import (
    ChannelTemplate,
    ClaimTemplateState,
    DomainPods,
    PodContext,
    mutate_pod,
    promised_template,
    review_claim_uses,
    template_state,
)
from rackloom.claim.cluster.admission.reviews import AdmissionMode
from rackloom.core.cluster.domain_objects import ComputeDomain
from rackloom.core.cluster.names import (
    GPU_CLIQUE_LABEL,
    ISOLATION_LABEL,
    AllocationMode,
    ImexIsolation,
    shared_claim_name,
)
from rackloom.core.cluster.pods import (
    CHANNEL_LABEL,
    GANG_LABEL,
    TEMPLATE_GATE,
    WATCHED_LABEL,
    PodObject,
    channel_label,
    decode_object,
)
from rackloom.core.domains.manifests import workload_template
from rackloom.core.domains.settings import ControllerSettings, ImexDaemonSettings
from rackloom.errors import Refused
from rackloom.lab.kube.patches import json_patch

REQUIRED = "requiredDuringSchedulingIgnoredDuringExecution"
HERE = ClaimTemplateState(True, ChannelTemplate("uid-1"))
PROMISED = ClaimTemplateState(False, ChannelTemplate("uid-1"))
SHARED = ClaimTemplateState(True, ChannelTemplate("uid-1", is_shared=True))
PLAIN = ClaimTemplateState(True)
MISSING = ClaimTemplateState()


def pod(*, template="imex", name="p", owner=None, uses=("channel",), **spec):
    meta = {"name": name, "uid": f"uid-{name}"}
    if owner:
        meta["ownerReferences"] = [{"kind": "Job", "name": owner, "uid": f"uid-{owner}", "controller": True}]
    claims = [{"name": "channel", "resourceClaimTemplateName": template}]
    container = {"name": "main", "resources": {"claims": [{"name": use} for use in uses]}}
    return {"metadata": meta, "spec": {"containers": [container], "resourceClaims": claims, **spec}}


def admitted(obj, templates, pods=()):
    """The pod after admission, and the verdict."""
    groups = {name: DomainPods(tuple(decode_object(obj, PodObject) for obj in pods)) for name in templates}
    verdict = mutate_pod(decode_object(obj, PodObject), PodContext(templates, groups))
    return json_patch(obj, verdict.patch), verdict


def gates(obj):
    return [gate["name"] for gate in obj["spec"].get("schedulingGates", ())]


def test_pods_of_a_compute_domain_are_led_to_one_another():
    done, _ = admitted(pod(), {"imex": HERE})
    (term,) = done["spec"]["affinity"]["podAffinity"][REQUIRED]
    assert term["topologyKey"] == GPU_CLIQUE_LABEL
    assert term["labelSelector"]["matchLabels"].items() <= done["metadata"]["labels"].items()
    assert done["metadata"]["labels"][CHANNEL_LABEL] == "imex"
    assert WATCHED_LABEL in done["metadata"]["labels"]
    assert gates(done) == []


def test_the_selector_holds_for_long_names_too():
    first, second = ("n" * 200 + end for end in "ab")
    labels = {channel_label(name) for name in (first, second, "n")}
    assert len(labels) == 3
    assert all(len(label) <= 63 for label in labels)


@pytest.mark.parametrize(
    "own",
    [
        {"affinity": {"podAffinity": {REQUIRED: [{"topologyKey": GPU_CLIQUE_LABEL}]}}},
        {"nodeSelector": {GPU_CLIQUE_LABEL: "a.1"}},
        {
            "affinity": {
                "nodeAffinity": {
                    REQUIRED: {
                        "nodeSelectorTerms": [
                            {
                                "matchExpressions": [
                                    {"key": GPU_CLIQUE_LABEL, "operator": "In", "values": ["a.1"]}
                                ]
                            }
                        ]
                    }
                }
            }
        },
    ],
)
def test_what_the_user_says_of_cliques_is_left_alone(own):
    done, _ = admitted(pod(**own), {"imex": HERE})
    assert done["spec"] == pod(**own)["spec"]
    assert done["metadata"]["labels"][CHANNEL_LABEL] == "imex"


def test_other_affinity_stays():
    other = {"topologyKey": "kubernetes.io/hostname"}
    affinity = {"podAffinity": {REQUIRED: [other]}, "podAntiAffinity": {REQUIRED: [other]}}
    done, _ = admitted(pod(affinity=affinity), {"imex": HERE})
    assert done["spec"]["affinity"]["podAffinity"][REQUIRED][0] == other
    assert len(done["spec"]["affinity"]["podAffinity"][REQUIRED]) == 2
    assert done["spec"]["affinity"]["podAntiAffinity"] == affinity["podAntiAffinity"]


def test_a_gang_is_placed_by_somebody_else():
    gang = pod()
    gang["metadata"]["labels"] = {GANG_LABEL: "g"}
    done, _ = admitted(gang, {"imex": HERE})
    assert "affinity" not in done["spec"]


def test_a_template_that_is_none_for_channels_changes_nothing():
    assert mutate_pod(decode_object(pod(), PodObject), PodContext({"imex": PLAIN}, {})).patch == ()


def test_a_pod_whose_template_is_not_there_is_gated():
    done, _ = admitted(pod(schedulingGates=[{"name": "other"}]), {"imex": MISSING})
    assert gates(done) == ["other", TEMPLATE_GATE]
    assert WATCHED_LABEL in done["metadata"]["labels"]
    assert "affinity" not in done["spec"]


def test_a_promised_template_is_waited_for_with_affinity_in_place():
    done, _ = admitted(pod(), {"imex": PROMISED})
    assert gates(done) == [TEMPLATE_GATE]
    assert "podAffinity" in done["spec"]["affinity"]


def test_a_pod_with_a_node_gets_no_gate_since_the_server_would_refuse_it():
    done, _ = admitted(pod(nodeName="n1"), {"imex": MISSING})
    assert gates(done) == []


def test_a_late_pod_waits_while_the_clique_of_the_early_ones_is_being_found():
    early = pod(name="early")
    done, _ = admitted(pod(name="late"), {"imex": HERE}, [early])
    assert gates(done) == [TEMPLATE_GATE]
    placed = pod(name="early", nodeName="n1")
    done, _ = admitted(pod(name="late"), {"imex": HERE}, [placed])
    assert gates(done) == []


def test_in_channel_mode_the_pod_uses_the_shared_claim():
    done, _ = admitted(pod(), {"imex": SHARED})
    assert done["spec"]["resourceClaims"] == [
        {"name": "channel", "resourceClaimName": shared_claim_name("uid-1")}
    ]
    waits_itself, _ = admitted(pod(), {"imex": ClaimTemplateState(False, SHARED.channel)})
    assert gates(waits_itself) == []


def test_a_pod_with_two_compute_domains_is_marked_the_same_at_a_second_look():
    both = pod()
    both["spec"]["resourceClaims"].append({"name": "more", "resourceClaimTemplateName": "own"})
    templates = {"imex": SHARED, "own": HERE}
    once, _ = admitted(both, templates)
    assert once["metadata"]["labels"][CHANNEL_LABEL] == "own"
    assert admitted(once, {"own": HERE})[0] == once


def test_two_workloads_in_one_compute_domain_are_warned():
    _, verdict = admitted(pod(owner="two"), {"imex": HERE}, [pod(owner="one", nodeName="n1")])
    (warning,) = verdict.warnings
    assert "Job one" in warning
    assert "memory" in warning
    _, same = admitted(pod(owner="one"), {"imex": HERE}, [pod(name="q", owner="one", nodeName="n1")])
    assert same.warnings == ()
    _, by_hand = admitted(pod(), {"imex": HERE}, [pod(name="q", nodeName="n1")])
    assert by_hand.warnings == ()


def test_a_claim_that_no_container_lists_is_named():
    idle = decode_object(pod(uses=()), PodObject)
    warned = review_claim_uses(idle, AdmissionMode.WARN)
    assert warned.allowed
    assert "'channel' is used by no container" in warned.warnings[0]
    assert not review_claim_uses(idle, AdmissionMode.ENFORCE).allowed
    by_init = pod(uses=())
    by_init["spec"]["initContainers"] = [{"name": "i", "resources": {"claims": [{"name": "channel"}]}}]
    assert review_claim_uses(decode_object(by_init, PodObject), AdmissionMode.ENFORCE).allowed


@pytest.mark.parametrize("isolation", ImexIsolation)
@pytest.mark.parametrize("mode", AllocationMode)
def test_a_template_says_the_same_as_the_compute_domain_that_promised_it(isolation, mode):
    domain = ComputeDomain(
        namespace="team", name="cd", uid="uid-1", template="imex",
        allocation_mode=mode, labels={ISOLATION_LABEL: isolation},
    )  # fmt: skip
    made = template_state(workload_template(domain, ControllerSettings(daemon=ImexDaemonSettings(image="i"))))
    assert made.exists
    assert made.channel == promised_template(domain, ImexIsolation.DOMAIN).channel
    assert made.channel is not None
    assert made.channel.is_shared == (isolation is ImexIsolation.CHANNEL and mode is AllocationMode.SINGLE)


FIXED = st.fixed_dictionaries
TERMS = FIXED({"topologyKey": st.sampled_from([GPU_CLIQUE_LABEL, "zone"])})
RULES = FIXED(
    {"key": st.sampled_from(["zone", GPU_CLIQUE_LABEL]), "operator": st.sampled_from(["In", "Exists"])}
)
NODE_TERMS = FIXED({}, optional={"matchExpressions": st.lists(RULES, max_size=2)})
NODE_SELECTORS = FIXED({"nodeSelectorTerms": st.lists(NODE_TERMS, max_size=2)})
AFFINITY = FIXED(
    {},
    optional={
        "podAffinity": st.none() | FIXED({}, optional={REQUIRED: st.none() | st.lists(TERMS, max_size=2)}),
        "nodeAffinity": st.none() | FIXED({}, optional={REQUIRED: st.none() | NODE_SELECTORS}),
    },
)
LABELS = st.dictionaries(
    st.sampled_from([CHANNEL_LABEL, WATCHED_LABEL, GANG_LABEL, "app"]), st.sampled_from(["a", "true"])
)
REFERENCES = {
    "resourceClaimTemplateName": st.none() | st.sampled_from(["t", "u"]),
    "resourceClaimName": st.just("c"),
}
CLAIMS = st.lists(FIXED({"name": st.sampled_from(["a", "b"])}, optional=REFERENCES), max_size=3)
GATES = st.lists(FIXED({"name": st.sampled_from(["x", TEMPLATE_GATE])}), max_size=2)
SPEC = {
    "affinity": st.none() | AFFINITY,
    "nodeName": st.sampled_from(["", "n1"]),
    "schedulingGates": st.none() | GATES,
}
PODS = FIXED(
    {
        "metadata": FIXED({"name": st.sampled_from("pq")}, optional={"labels": st.none() | LABELS}),
        "spec": FIXED({"resourceClaims": st.none() | CLAIMS}, optional=SPEC),
    }
)
TEMPLATES = FIXED(dict.fromkeys("tu", st.sampled_from([HERE, PROMISED, SHARED, PLAIN, MISSING])))


@given(PODS, TEMPLATES, st.lists(PODS, max_size=2))
def test_admitting_twice_changes_nothing_more(obj, templates, others):
    def around(owner):
        named = {name: templates[name] for name in decode_object(owner, PodObject).templates}
        groups = {
            name: DomainPods(tuple(decode_object(other, PodObject) for other in others)) for name in named
        }
        return PodContext(named, groups)

    once = json_patch(obj, mutate_pod(decode_object(obj, PodObject), around(obj)).patch)
    assert mutate_pod(decode_object(once, PodObject), around(once)).patch == ()


KEYS = st.sampled_from(["metadata", "spec", "labels", "containers", "resourceClaims", "affinity"])
ANYTHING = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=6),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(KEYS, inner, max_size=4),
    max_leaves=12,
)


@given(ANYTHING)
def test_any_object_is_read_or_refused(obj):
    with contextlib.suppress(Refused):
        found = decode_object(obj, PodObject)
        mutate_pod(found, PodContext(dict.fromkeys(found.templates, MISSING), {}))
        review_claim_uses(found, AdmissionMode.ENFORCE)
