"""The gated pods that may go, and their clique, decided from the objects in the cluster."""

from hypothesis import given
from hypothesis import strategies as st
from tests.claim.cluster.admission.gate_site import pod

from rackloom.claim.cluster.admission.channel_pods import (
    ChannelTemplate,
    ClaimTemplateState,
    DomainPods,
)
from rackloom.claim.cluster.admission.gates import CreatedTooEarly, GateOpening, gate_steps
from rackloom.core.cluster import names
from rackloom.core.cluster.pods import CHANNEL_LABEL, GANG_LABEL, PodObject, decode_object
from rackloom.lab.kube.patches import json_patch

REQUIRED = "requiredDuringSchedulingIgnoredDuringExecution"
HERE = ClaimTemplateState(True, ChannelTemplate("uid-1"))


def decided(pods, templates, clique=None):
    """The decision about the gated ones in a group of pods."""
    values = tuple(decode_object(obj, PodObject) for obj in pods)
    gated = tuple(value for value in values if value.gate_index is not None)
    groups = {name: DomainPods(values, clique) for name, template in templates.items() if template.channel}
    return gate_steps(gated, templates, groups)


def opened(pods, found):
    """The pods of the openings, after their patches."""
    by_name = {obj["metadata"]["name"]: obj for obj in pods}
    patches = [step.patch("team") for step in found if isinstance(step, GateOpening)]
    return {patch.name: json_patch(by_name[patch.name], patch.patch) for patch in patches}


def near(obj):
    return [
        rule
        for term in obj["spec"]["affinity"]["nodeAffinity"][REQUIRED]["nodeSelectorTerms"]
        for rule in term.get("matchExpressions", [])
    ]


def test_a_gate_stays_while_a_template_is_missing():
    assert decided([pod("a")], {"imex": ClaimTemplateState()}) == ()


def test_a_template_of_others_just_opens():
    done = opened([pod("a")], decided([pod("a")], {"imex": ClaimTemplateState(True)}))
    assert done["a"]["spec"] == {**pod("a")["spec"], "schedulingGates": [{"name": "other"}]}


def test_one_pod_goes_first_into_any_clique():
    pods = [pod("b"), pod("a")]
    done = opened(pods, decided(pods, {"imex": HERE}))
    assert list(done) == ["a"]
    assert near(done["a"]) == [{"key": names.GPU_CLIQUE_LABEL, "operator": "Exists"}]
    assert done["a"]["metadata"]["labels"][CHANNEL_LABEL] == "imex"


def test_the_others_wait_for_it_and_follow():
    pods = [pod("a", gated=False), pod("b"), pod("c")]
    assert decided(pods, {"imex": HERE}) == ()
    placed = [pod("a", gated=False, nodeName="n1"), *pods[1:]]
    done = opened(placed, decided(placed, {"imex": HERE}, "u.1"))
    assert sorted(done) == ["b", "c"]
    assert near(done["b"]) == [{"key": names.GPU_CLIQUE_LABEL, "operator": "In", "values": ["u.1"]}]


def test_every_alternative_of_the_users_own_node_affinity_is_tightened():
    zone = {"key": "zone", "operator": "Exists"}
    terms = [{"matchExpressions": [zone]}, {"matchFields": [zone]}, {}]
    own = {"nodeAffinity": {REQUIRED: {"nodeSelectorTerms": terms}}}
    pods = [pod("a", affinity=own)]
    done = opened(pods, decided(pods, {"imex": HERE}))
    rule = {"key": names.GPU_CLIQUE_LABEL, "operator": "Exists"}
    assert near(done["a"]) == [zone, rule, rule]


def test_pods_with_a_rule_of_their_own_go_at_once():
    own = {"podAffinity": {REQUIRED: [{"topologyKey": names.GPU_CLIQUE_LABEL}]}}
    pods = [pod(name, affinity=own) for name in "ab"]
    done = opened(pods, decided(pods, {"imex": HERE}))
    assert [obj["spec"]["affinity"] for obj in done.values()] == [own, own]


def test_pods_without_one_follow_those_that_have():
    own = {"podAffinity": {REQUIRED: [{"topologyKey": names.GPU_CLIQUE_LABEL}]}}
    pods = [pod("a"), pod("led", affinity=own)]
    assert list(opened(pods, decided(pods, {"imex": HERE}))) == ["led"]


def test_a_gang_is_not_held():
    pods = [pod(name, labels={GANG_LABEL: "g"}) for name in "ab"]
    done = opened(pods, decided(pods, {"imex": HERE}))
    assert all("affinity" not in obj["spec"] for obj in done.values())
    assert len(done) == 2


def test_in_channel_mode_an_early_pod_is_told_what_to_do():
    (step,) = decided([pod("a")], {"imex": ClaimTemplateState(True, ChannelTemplate("u", is_shared=True))})
    assert isinstance(step, CreatedTooEarly)
    assert "create it again" in step.message


def member(name):
    own = {"podAffinity": {REQUIRED: [{"topologyKey": names.GPU_CLIQUE_LABEL}]}}
    return st.builds(
        lambda gated, node, led: pod(
            name,
            gated=gated and not node,
            **({"nodeName": "n1"} if node else {}),
            **({"affinity": own} if led else {}),
        ),
        st.booleans(),
        st.booleans(),
        st.booleans(),
    )


@given(st.tuples(*(member(name) for name in "abc")), st.booleans())
def test_never_two_pods_without_a_rule_are_on_their_way_to_cliques_nobody_knows(pods, in_clique):
    clique = "u.1" if in_clique and any(obj["spec"].get("nodeName") for obj in pods) else None
    done = opened(pods, decided(pods, {"imex": HERE}, clique))
    after = [done.get(obj["metadata"]["name"], obj) for obj in pods]
    loose = [
        obj["metadata"]["name"]
        for obj in after
        if "podAffinity" not in obj["spec"].get("affinity", {})
        and len(obj["spec"]["schedulingGates"]) < 2
        and not obj["spec"].get("nodeName")
    ]
    started = [name for name in loose if name in done]
    if clique is None:
        assert not started or loose == started[:1]
    else:
        assert all(near(done[name])[0]["operator"] == "In" for name in started)
    waiting = [obj for obj in after if len(obj["spec"]["schedulingGates"]) == 2]
    moving = [obj for obj in after if obj not in waiting and not obj["spec"].get("nodeName")]
    assert not waiting or moving, "somebody is on the way, so the others will be let in"
