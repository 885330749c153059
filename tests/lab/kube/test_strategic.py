"""Strategic merge patches. The orders and oddities here are the answers of an API server of 1.36.4."""

import copy

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rackloom.claim.kube.api import Rejected
from rackloom.core.cluster import objects
from rackloom.lab.kube import patches
from rackloom.lab.kube.kubectl import writes
from rackloom.lab.kube.kubectl.writes import MERGE_KEYS
from rackloom.lab.kube.objects import TYPE_SCHEMAS

POD, NODE = MERGE_KEYS[objects.POD], MERGE_KEYS[objects.NODE]
NAMES = st.sampled_from("abcdef")
VALUES = st.none() | st.integers(0, 3) | st.text("xyz", max_size=2)
MAPS = st.recursive(VALUES, lambda inner: st.dictionaries(st.sampled_from("klmn"), inner, max_size=3)).filter(
    lambda value: isinstance(value, dict)
)


def elements(names: st.SearchStrategy[str]) -> st.SearchStrategy[list[dict[str, str]]]:
    item = st.fixed_dictionaries({"name": names, "value": st.sampled_from("123")})
    return st.lists(item, unique_by=lambda found: found["name"], max_size=6)


def env(*found: dict[str, object], **more: object) -> dict[str, object]:
    return {"spec": {"containers": [{"name": "c", "env": list(found), **more}]}}


def env_of(pod: object) -> list[dict[str, str]]:
    found: list[dict[str, str]] = pod["spec"]["containers"][0]["env"]  # type: ignore[index]
    return found


@given(MAPS, MAPS)
def test_where_there_are_no_lists_and_directives_it_is_a_merge_patch(target, patch):
    assert writes.strategic_merge(target, patch, {}) == patches.merge_patch(target, patch)


@given(MAPS, MAPS)
def test_it_changes_neither_input_and_twice_is_once(target, patch):
    before = copy.deepcopy((target, patch))
    once = writes.strategic_merge(target, patch, {})
    assert writes.strategic_merge(once, patch, {}) == once
    assert (target, patch) == before


@given(elements(NAMES), elements(NAMES))
def test_a_list_with_a_key_holds_what_both_name_and_the_patch_says_which_value(have, patched):
    merged = env_of(writes.strategic_merge(env(*have), env(*patched), POD))
    wanted = {item["name"]: item["value"] for item in (*have, *patched)}
    assert {item["name"]: item["value"] for item in merged} == wanted
    assert len(merged) == len(wanted)
    named = [item["name"] for item in patched]
    assert [item["name"] for item in merged if item["name"] in named] == named, "in the order of the patch"
    left = [item for item in have if item["name"] not in named]
    assert [item for item in merged if item["name"] not in named] == left, "and the others in their own"


@given(elements(NAMES), st.sets(NAMES))
def test_elements_are_deleted_by_their_key(have, gone):
    # A deleted element that was not there would be added: see below.
    patch = env(*({"name": item["name"], "$patch": "delete"} for item in have if item["name"] in gone))
    merged = env_of(writes.strategic_merge(env(*have), patch, POD))
    assert merged == [item for item in have if item["name"] not in gone]


@given(elements(NAMES), elements(NAMES))
def test_a_list_is_replaced_where_the_patch_says_so(have, patched):
    assert env_of(writes.strategic_merge(env(*have), env({"$patch": "replace"}, *patched), POD)) == patched


@given(elements(NAMES), st.randoms(use_true_random=False))
def test_an_order_alone_reorders(have, chance):
    order = [{"name": item["name"]} for item in have]
    chance.shuffle(order)
    patch = {"spec": {"containers": [{"name": "c", "$setElementOrder/env": order}]}}
    merged = env_of(writes.strategic_merge(env(*have), patch, POD))
    assert [item["name"] for item in merged] == [item["name"] for item in order]


@given(st.lists(NAMES, unique=True), st.lists(NAMES, unique=True), st.lists(NAMES, unique=True))
def test_finalizers_are_a_set(have, patched, gone):
    patch = {"metadata": {"finalizers": patched, "$deleteFromPrimitiveList/finalizers": gone}}
    merged = writes.strategic_merge({"metadata": {"finalizers": have}}, patch, NODE)["metadata"]["finalizers"]
    assert set(merged) == {*have, *patched} - {*gone}
    assert len(merged) == len(set(merged))


def test_an_element_stands_before_those_that_it_stood_before():
    def named(names: str) -> list[dict[str, str]]:
        return [{"name": name, "value": "1"} for name in names]

    def order(have: str, patched: str) -> str:
        merged = env_of(writes.strategic_merge(env(*named(have)), env(*named(patched)), POD))
        return "".join(item["name"] for item in merged)

    assert order("abc", "e") == "eabc"
    assert order("abc", "b") == "abc"
    assert order("abcd", "db") == "acdb"


def test_what_kubectl_sends_to_cordon_and_taint():
    node = {"metadata": {"name": "n"}, "spec": {"taints": [{"key": "a", "effect": "NoSchedule"}]}}
    cordoned = writes.strategic_merge(node, {"spec": {"unschedulable": True}}, NODE)
    assert cordoned["spec"] == {**node["spec"], "unschedulable": True}
    assert writes.strategic_merge(cordoned, {"spec": {"unschedulable": None}}, NODE) == node
    taints = [{"key": "b", "effect": "NoExecute"}]
    assert writes.strategic_merge(node, {"spec": {"taints": taints}}, NODE)["spec"] == {"taints": taints}


def test_what_is_not_named_goes_where_the_patch_retains_keys():
    pod = {"spec": {"volumes": [{"name": "v", "emptyDir": {}}]}}
    host = {"name": "v", "hostPath": {"path": "/x"}}
    patch = {"spec": {"volumes": [{**host, "emptyDir": None, "$retainKeys": ["name", "hostPath"]}]}}
    assert writes.strategic_merge(pod, patch, POD) == {"spec": {"volumes": [host]}}


def test_a_map_is_replaced_or_emptied():
    pod = {"metadata": {"labels": {"a": "1", "b": "2"}}}
    replaced = writes.strategic_merge(pod, {"metadata": {"labels": {"$patch": "replace", "c": "3"}}}, POD)
    assert replaced == {"metadata": {"labels": {"c": "3"}}}
    assert writes.strategic_merge(pod, {"metadata": {"labels": {"$patch": "delete"}}}, POD) == {
        "metadata": {"labels": {}}
    }


def test_directives_mean_nothing_where_nothing_was():
    patch = {"spec": {"containers": [{"name": "c", "env": [{"name": "x", "$patch": "delete"}]}]}}
    assert writes.strategic_merge({}, patch, POD) == {
        "spec": {"containers": [{"name": "c", "env": [{"name": "x"}]}]}
    }
    absent = {
        "metadata": {"$setElementOrder/finalizers": ["a"], "$deleteFromPrimitiveList/finalizers": ["a"]}
    }
    assert writes.strategic_merge({"metadata": {}}, absent, POD) == {"metadata": {}}


@pytest.mark.parametrize(
    ("patch", "why"),
    [
        ({"$patch": "forget"}, "unknown patch type"),
        ({"spec": {"containers": [{"image": "x"}]}}, "does not contain declared merge key: name"),
        ({"spec": {"containers": ["x"]}}, "is not an object"),
        ({"spec": {"$retainKeys": ["a"], "b": 1}}, "must name every field"),
        ({"spec": {"$setElementOrder/containers": "x"}}, "must be a list"),
        (
            {
                "spec": {
                    "containers": [{"name": "a"}, {"name": "b"}],
                    "$setElementOrder/containers": [{"name": "b"}, {"name": "a"}],
                }
            },
            "does not match",
        ),
    ],
)
def test_a_patch_that_cannot_be_read_is_refused(patch, why):
    with pytest.raises(Rejected, match=why) as refused:
        writes.strategic_merge({"spec": {"containers": [{"name": "z"}]}}, patch, POD)
    assert refused.value.code == 400


def test_every_built_in_type_takes_one_and_no_custom_one_does():
    custom = {kind for kind in TYPE_SCHEMAS if "." in kind.group and not kind.group.endswith(".k8s.io")}
    assert custom == {objects.COMPUTE_DOMAIN, objects.COMPUTE_DOMAIN_CLIQUE, objects.GANG_PLAN}
    assert MERGE_KEYS.keys() == TYPE_SCHEMAS.keys() - custom
