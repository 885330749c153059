"""What is rendered for KAI, against the schema of KAI itself: strict, on a real API server.

Its scheduler is not run here, so what it makes of the annotations is not shown.
"""

from pathlib import Path

import pytest
from tests.cluster.control_plane import ControlPlane
from tests.cluster.renderings.applied import apply, kubectl, rendered
from tests.cluster.renderings.build import KAI, SCHEMA, source
from tests.cluster.renderings.conftest import TRAYS, AddRack
from tests.cluster.renderings.jobs import job

from rackloom.claim.kube.api import Kind, KubeApi
from rackloom.claim.kube.kinds import JOB

pytestmark = pytest.mark.anyio
TOPOLOGY = Kind("kai.scheduler", "v1alpha1", "Topology", "topologies", namespaced=False)


async def test_the_topology_and_the_job_are_taken_as_they_stand(
    operators: Path,
    cluster: ControlPlane,
    api: KubeApi,
    add_rack: AddRack,
    namespace: str,
    tmp_path: Path,
) -> None:
    crds = source(SCHEMA, KAI) / "deployments" / "kai-scheduler" / "crds"
    kubectl(cluster, "apply", "--server-side", "-f", str(crds / "kai.scheduler_topologies.yaml"))
    kubectl(cluster, "wait", "--for=condition=Established", "crd", "--all")
    await add_rack()

    documents = rendered(cluster, job(tmp_path, namespace, TRAYS), "kai")
    apply(cluster, documents)

    topology = await api.get(TOPOLOGY, documents[0]["metadata"]["name"])
    levels = [level["nodeLabel"] for level in topology["spec"]["levels"]]
    marks = (await api.get(JOB, "rack", namespace))["metadata"]["annotations"]
    assert marks["kai.scheduler/topology"] == topology["metadata"]["name"]
    assert marks["kai.scheduler/topology-required-placement"] in levels
    assert marks["kai.scheduler/batch-min-member"] == str(TRAYS)
