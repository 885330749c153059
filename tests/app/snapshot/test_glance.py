"""Projecting a projection changes nothing."""

from hypothesis import given
from hypothesis import strategies as st

from rackloom.core.cluster import names
from rackloom.core.cluster.objects import POD
from rackloom.core.cluster.projection import SNAPSHOT_KINDS, project_object

WORDS = st.sampled_from(["a", "b"])
LABELS = st.dictionaries(st.sampled_from(["x", names.GPU_CLIQUE_LABEL, names.COMPUTE_DOMAIN_LABEL]), WORDS)
OWNED = st.fixed_dictionaries(
    {
        "f:metadata": st.fixed_dictionaries(
            {"f:labels": LABELS.map(lambda of: {f"f:{label}": {} for label in of})}
        )
    }
)


def some(**reported):
    return st.fixed_dictionaries({}, optional=reported)


OBJECTS = st.fixed_dictionaries(
    {
        "metadata": st.fixed_dictionaries(
            {"name": WORDS},
            optional={
                "namespace": WORDS,
                "uid": WORDS,
                "resourceVersion": WORDS,
                "labels": LABELS,
                "annotations": st.dictionaries(st.sampled_from(["x", names.MESH_ANNOTATION]), WORDS),
                "managedFields": st.lists(
                    st.fixed_dictionaries(
                        {"manager": WORDS, "fieldsV1": OWNED},
                        optional={"time": st.just("2027-01-15T07:00:00Z")},
                    ),
                    max_size=3,
                ),
                "creationTimestamp": st.just("2027-01-15T07:00:00Z"),
                "ownerReferences": st.just([{"kind": "Job", "name": "a", "controller": True}]),
            },
        ),
        "spec": some(
            taints=st.just([{"key": "a"}]),
            unschedulable=st.booleans(),
            nodeName=WORDS,
            resourceClaims=st.lists(st.just({"name": "a"}), max_size=2),
            containers=st.lists(
                st.fixed_dictionaries({"name": st.sampled_from(["a", names.DAEMON_CONTAINER])})
            ),
        ),
    },
    optional={
        "status": some(
            phase=WORDS,
            podIP=WORDS,
            extendedResourceClaimStatus=st.just({"resourceClaimName": "made"}),
            resourceClaimStatuses=st.just([{"name": "a"}]),
            conditions=st.lists(st.fixed_dictionaries({"type": st.sampled_from(["Ready", "a"])}), max_size=2),
            nodeInfo=some(containerRuntimeVersion=WORDS, kernelVersion=WORDS),
        )
    },
)


@given(st.sampled_from(SNAPSHOT_KINDS), OBJECTS)
def test_a_glance_at_a_glance_is_the_same(kind, obj):
    once = project_object(kind, obj)
    assert once is None or project_object(kind, once) == once


def test_a_pod_whose_claim_was_made_for_it_is_kept():
    made = {"resourceClaimName": "made"}
    pod = {"metadata": {"name": "a"}, "spec": {}, "status": {"extendedResourceClaimStatus": made}}
    assert project_object(POD, project_object(POD, pod))["status"] == {"extendedResourceClaimStatus": made}
