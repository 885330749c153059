"""An ungated pod is scheduled to its tray and nowhere else, by the rules of kube-scheduler."""

from hypothesis import given
from hypothesis import strategies as st
from tests.core.cluster.views import lists_of
from tests.core.gangs.gang_toy import read_site
from tests.core.gangs.test_gang_objects import REQUIRED, node, pod

from rackloom.core.cluster.gang_objects import GANG_TAINT, read_member
from rackloom.core.cluster.nodes import read_node
from rackloom.core.cluster.pods import read_pod
from rackloom.core.cluster.scheduling import is_node_selected
from rackloom.core.gangs.requests import group_terms
from rackloom.core.gangs.slots import pin_and_ungate
from rackloom.core.gangs.trays import site_for_terms
from rackloom.lab.kube.controllers.scheduler import is_tolerated
from rackloom.lab.kube.patches import json_patch

NAMES = ("n1", "n2", "n3")
VALUES = st.sampled_from("ab")
EXPRESSIONS = st.one_of(
    st.builds(
        lambda key, operator, values: {"key": key, "operator": operator, "values": values},
        VALUES,
        st.sampled_from(["In", "NotIn"]),
        st.lists(VALUES, min_size=1, max_size=2),
    ),
    st.builds(
        lambda key, operator: {"key": key, "operator": operator},
        VALUES,
        st.sampled_from(["Exists", "DoesNotExist"]),
    ),
)
FIELDS = st.builds(
    lambda operator, name: {"key": "metadata.name", "operator": operator, "values": [name]},
    st.sampled_from(["In", "NotIn"]),
    st.sampled_from(NAMES),
)
TERMS = st.fixed_dictionaries(
    {},
    optional={
        "matchExpressions": st.lists(EXPRESSIONS, min_size=1, max_size=2),
        "matchFields": st.lists(FIELDS, min_size=1, max_size=2),
    },
)
TOLERATIONS = st.fixed_dictionaries(
    {"key": VALUES, "operator": st.sampled_from(["Exists", "Equal"])},
    optional={"effect": st.sampled_from(["NoSchedule", "NoExecute"])},
).map(lambda expression: expression if expression["operator"] == "Exists" else expression | {"value": "v"})
TAINTS = st.fixed_dictionaries(
    {"key": VALUES, "effect": st.sampled_from(["NoSchedule", "NoExecute", "PreferNoSchedule"])},
    optional={"value": st.sampled_from(["v", "w"])},
)


@st.composite
def nodes(draw):
    found = []
    for name in NAMES:
        obj = node(name, taints=draw(st.lists(TAINTS, max_size=1)))
        obj["metadata"]["labels"] |= draw(st.dictionaries(VALUES, VALUES))
        found.append(obj)
    return found


@st.composite
def pods(draw):
    spec = {}
    if draw(st.booleans()):
        spec["nodeSelector"] = draw(st.dictionaries(VALUES, VALUES, max_size=1))
    if draw(st.booleans()):
        terms = draw(st.lists(TERMS, min_size=1, max_size=3))
        spec["affinity"] = {"nodeAffinity": {REQUIRED: {"nodeSelectorTerms": terms}}}
    if draw(st.booleans()):
        spec["tolerations"] = draw(st.lists(TOLERATIONS, max_size=2))
    return pod(gpus=4, **spec)


@given(nodes(), pods())
def test_a_tray_is_open_to_a_member_just_where_the_scheduler_takes_it(there, held):
    member = read_member(held)
    site = read_site(lists_of(there))
    by_name = {obj["metadata"]["name"]: obj for obj in there}
    nodes = {name: read_node(obj) for name, obj in by_name.items()}
    found = site_for_terms(site, group_terms({"member": [member]}).values(), nodes)
    for tray in found.trays:
        sent = json_patch(held, pin_and_ungate(member, tray.name, "plan", 1e9).patch)
        reserved = {"key": GANG_TAINT, "value": "plan", "effect": "NoSchedule"}
        by_name[tray.name]["spec"]["taints"].append(reserved)
        takes = {
            name
            for name, obj in by_name.items()
            if is_node_selected(read_pod(sent).spec, read_node(obj)) and is_tolerated(sent["spec"], obj)
        }
        assert takes == (set() if tray.shut else {tray.name})
        by_name[tray.name]["spec"]["taints"].remove(reserved)


def test_a_node_is_closed_by_its_state_once_and_by_each_other_taint():
    cordon = {"key": "node.kubernetes.io/unschedulable", "effect": "NoSchedule"}
    unready = {"key": "node.kubernetes.io/not-ready", "effect": "NoExecute"}
    team = {"key": "team", "value": "a", "effect": "NoSchedule"}
    there = (
        node("n1", unschedulable=True, taints=[cordon]),
        node("n2", ready="False", taints=[unready, team]),
        node("n3", unschedulable=True, taints=[cordon, team]),
    )
    tolerant = pod(gpus=4, tolerations=[{"key": cordon["key"], "operator": "Exists"}])
    for held in (pod(gpus=4), tolerant):
        site = read_site(lists_of(there))
        terms = group_terms({"member": [read_member(held)]}).values()
        found = site_for_terms(site, terms, {obj["metadata"]["name"]: read_node(obj) for obj in there})
        reasons = {tray.name: tray.shut for tray in found.trays}
        assert reasons == {
            "n1": "cordoned",
            "n2": "not ready; taint team=a",
            "n3": "cordoned; taint team=a",
        }
