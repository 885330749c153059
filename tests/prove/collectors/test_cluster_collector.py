"""Objects of an API server read into evidence."""

import asyncio
import json

import pytest

from rackloom.core.cluster import names
from rackloom.core.cluster.device_configs import ChannelConfig, imex_config_json
from rackloom.core.cluster.objects import (
    COMPUTE_DOMAIN,
    GANG_PLAN,
    NODE,
    POD,
    RESOURCE_CLAIM,
    RESOURCE_CLAIM_TEMPLATE,
)
from rackloom.core.diagnosis.catalogue import Check
from rackloom.core.diagnosis.checks.domains import check_domains
from rackloom.core.diagnosis.findings import CheckState, verdict
from rackloom.prove.collectors.cluster import collect_cluster

CLIQUE = "7b968a6d-c8aa-45e1-9e07-e1e51be99c31.1"
ODD = [
    "no json",
    "[]",
    '{"complete": true, "missing": 5}',
    '{"complete": "yes"}',
    '{"peers": ' + "[" * 100_000,
    "\ud800",
]
"""Annotations that cannot be read: other JSON, too deep, no Unicode."""
MINE = {names.COMPUTE_DOMAIN_LABEL: "cd-1"}


def cluster():
    """A job of one pod in which every check holds."""
    opaque = {"driver": names.IMEX_DRIVER, "parameters": imex_config_json(ChannelConfig(domain_id="cd-1"))}
    ready = {"type": "Ready", "status": "True", "reason": "AllNodesReady", "message": "1 nodes ready"}
    mesh = {names.MESH_ANNOTATION: json.dumps({"complete": True, "peers": 0, "missing": []})}
    daemon_labels = {**MINE, names.CLIQUE_ID_LABEL: CLIQUE}
    return {
        COMPUTE_DOMAIN: [
            {
                "metadata": {"namespace": "team", "name": "job", "uid": "cd-1"},
                "spec": {"channel": {"resourceClaimTemplate": {"name": "t"}}},
                "status": {"status": "Ready", "nodes": [], "conditions": [ready]},
            }
        ],
        GANG_PLAN: [],
        RESOURCE_CLAIM_TEMPLATE: [{"metadata": {"namespace": "team", "name": "t", "labels": MINE}}],
        RESOURCE_CLAIM: [
            {
                "metadata": {"namespace": "team", "name": "w-c-x"},
                "spec": {"devices": {"config": [{"opaque": opaque}]}},
                "status": {"allocation": {}, "reservedFor": [{"resource": "pods", "name": "w", "uid": "p"}]},
            }
        ],
        POD: [
            {
                "metadata": {"namespace": "team", "name": "w", "uid": "p"},
                "spec": {
                    "nodeName": "n",
                    "containers": [{"name": "main"}],
                    "resourceClaims": [{"name": "c", "resourceClaimTemplateName": "t"}],
                },
                "status": {
                    "phase": "Running",
                    "resourceClaimStatuses": [{"name": "c", "resourceClaimName": "w-c-x"}],
                },
            },
            {
                "metadata": {
                    "namespace": "rackloom-imex",
                    "name": "d",
                    "uid": "q",
                    "labels": daemon_labels,
                    "annotations": mesh,
                },
                "spec": {
                    "nodeName": "n",
                    "containers": [{"name": "compute-domain-daemon"}],
                    "resourceClaims": [{"name": "daemon", "resourceClaimTemplateName": "d"}],
                },
                "status": {"phase": "Running"},
            },
            {"metadata": {"namespace": "team", "name": "web", "uid": "r"}, "spec": {"containers": []}},
        ],
        NODE: [{"metadata": {"name": "n", "labels": {names.GPU_CLIQUE_LABEL: CLIQUE}}}],
    }


def evidence(objects):
    async def read(kind):
        return objects[kind]

    return asyncio.run(collect_cluster(read, "rackloom-imex"))


def findings(objects):
    return check_domains(evidence(objects))


def failed(objects):
    return {finding.check for finding in findings(objects) if finding.state is CheckState.FAILS}


def test_a_healthy_job_is_seen_as_one():
    found = findings(cluster())
    assert len(found) == 5
    assert verdict(found) is CheckState.HOLDS


def test_an_unallocated_claim():
    objects = cluster()
    objects[RESOURCE_CLAIM][0].pop("status")
    assert failed(objects) == {Check.CLAIMS}


def test_a_template_that_nobody_makes():
    objects = cluster()
    objects[POD][0]["spec"]["resourceClaims"][0]["resourceClaimTemplateName"] = "u"
    assert failed(objects) == {Check.TEMPLATES}


def test_a_pod_that_has_ended_needs_nothing():
    objects = cluster()
    objects[POD][0]["status"]["phase"] = "Succeeded"
    objects[RESOURCE_CLAIM].clear()
    assert not failed(objects)


def test_a_mesh_with_a_gap():
    objects = cluster()
    text = {"complete": False, "peers": 1, "missing": ["0 -> 1: INVALID"]}
    objects[POD][1]["metadata"]["annotations"] = {names.MESH_ANNOTATION: json.dumps(text)}
    assert failed(objects) == {Check.MESH}


def test_a_gap_is_shown_in_one_line():
    objects = cluster()
    text = {"complete": False, "missing": ["0 -> 1:\x1b[2J\nINVALID"]}
    objects[POD][1]["metadata"]["annotations"] = {names.MESH_ANNOTATION: json.dumps(text)}
    (daemon,) = evidence(objects).daemons
    assert daemon.missing == ("0 -> 1: [2J INVALID",)


@pytest.mark.parametrize("text", ODD)
def test_an_unreadable_mesh_is_unknown(text):
    objects = cluster()
    objects[POD][1]["metadata"]["annotations"] = {names.MESH_ANNOTATION: text}
    meshes = [finding.state for finding in findings(objects) if finding.check == Check.MESH]
    assert meshes == [CheckState.UNKNOWN]


def test_what_cannot_be_read_is_told_to_the_caller():
    objects = cluster()
    del objects[NODE]
    with pytest.raises(KeyError):
        findings(objects)


def test_what_a_tenants_pod_says_of_imex_counts_for_nothing():
    objects = cluster()
    forged = json.loads(json.dumps(objects[POD][1]))
    text = {"complete": False, "missing": ["forged"]}
    forged["metadata"] |= {"namespace": "team", "annotations": {names.MESH_ANNOTATION: json.dumps(text)}}
    objects[POD].append(forged)
    assert not failed(objects) & {Check.MESH}
