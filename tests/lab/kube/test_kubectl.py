"""kubectl against the fake server, over a socket: commands of people, and the fixes that the doctor names."""

import asyncio
import json
import os
import shutil
from pathlib import Path

import pytest
from tests.documented import commands_of

from rackloom.app.twin.up import served_api
from rackloom.claim.kube.api import NotFound
from rackloom.core.cluster import objects
from rackloom.core.cluster.objects import Object
from rackloom.core.domains.crds import domain_crds
from rackloom.lab.kube.direct import DirectApi
from rackloom.lab.kube.faults import RequestFault
from rackloom.lab.kube.server import FakeKube

pytestmark = pytest.mark.slow

PATIENCE = 120.0
ADMIN = "admin"


class Kubectl:
    """The program of this machine, with a folder for its cache."""

    def __init__(self, program: str, folder: Path) -> None:
        self.program, self.folder = program, folder
        self.config = folder / "kubeconfig"
        self.kube: FakeKube

    async def __call__(self, *words: str) -> str:
        """Its output."""
        code, out, errors = await self.tried(*words)
        assert code == 0, errors
        return out

    async def typed(self, command: str) -> tuple[int | None, str, str]:
        """The exit status and both outputs of a shell line."""
        known = {**os.environ, "KUBECONFIG": str(self.config), "HOME": str(self.folder)}
        done = await asyncio.create_subprocess_shell(
            command, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE, env=known
        )
        out, errors = await asyncio.wait_for(done.communicate(), PATIENCE)
        return done.returncode, out.decode(), errors.decode()

    async def tried(self, *words: str) -> tuple[int | None, str, str]:
        """Its exit status and both outputs."""
        where = ("--kubeconfig", str(self.config), "--cache-dir", str(self.folder / "cache"))
        done = await asyncio.create_subprocess_exec(
            self.program, *where, *words, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE
        )
        out, errors = await asyncio.wait_for(done.communicate(), PATIENCE)
        return done.returncode, out.decode(), errors.decode()

    def file(self, obj: Object) -> str:
        """A manifest."""
        path = self.folder / f"{obj['kind']}.json"
        path.write_text(json.dumps(obj))
        return str(path)


def played(tmp_path, story):
    """Run `story(kubectl, api)` against a server with one node and one pod on it."""
    program = shutil.which("kubectl")
    if program is None:
        pytest.skip("there is no kubectl on the PATH")

    async def run():
        kube, kubectl = FakeKube(), Kubectl(program, tmp_path)
        kubectl.kube = kube
        api = DirectApi(kube, ADMIN)
        ready = {"conditions": [{"type": "Ready", "status": "True"}]}
        await api.create(objects.NODE, {"metadata": {"name": "n"}, "status": ready})
        await api.create(objects.POD, pod("p") | {"spec": {**pod("p")["spec"], "nodeName": "n"}})
        async with served_api(kube, ADMIN, kubectl.config):
            await story(kubectl, api)

    asyncio.run(run())


def pod(name, image="i"):
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": name, "namespace": "default"},
        "spec": {"containers": [{"name": "c", "image": image}]},
    }


def test_a_node_is_cordoned_labelled_tainted_and_drained(tmp_path):
    async def story(kubectl, api):
        await kubectl("cordon", "n")
        assert "Ready,SchedulingDisabled" in await kubectl("get", "nodes")
        await kubectl("uncordon", "n")
        assert (await api.get(objects.NODE, "n")).get("spec", {}) == {}
        await kubectl("label", "node", "n", "a=1")
        code, _, errors = await kubectl.tried("label", "node", "n", "a=2")
        assert (code, "--overwrite is false" in errors) == (1, True)
        await kubectl("label", "node", "n", "a=2", "--overwrite")
        await kubectl("annotate", "node", "n", "why=repair")
        await kubectl("taint", "node", "n", "a=1:NoSchedule")
        await kubectl("taint", "node", "n", "b=1:NoExecute")
        await kubectl("taint", "node", "n", "a-")
        node = await api.get(objects.NODE, "n")
        assert (node["metadata"]["labels"], node["metadata"]["annotations"]) == (
            {"a": "2"},
            {"why": "repair"},
        )
        assert node["spec"]["taints"] == [{"key": "b", "value": "1", "effect": "NoExecute"}]
        assert "pod/p evicted" in await kubectl("drain", "n", "--force", "--grace-period=0")
        with pytest.raises(NotFound):
            await api.get(objects.POD, "p", "default")
        assert (await api.get(objects.NODE, "n"))["spec"]["unschedulable"] is True

    played(tmp_path, story)


def test_a_pod_that_counts_its_gpus_is_found_and_evicted_as_the_page_says(tmp_path):
    names = {"NODE": "n", "NAMESPACE": "default", "POD": "counts", "CLAIM": "counts-gpus"}
    listed, devices, evict = commands_of("gpus.md", "### Pods on a tainted GPU", names)

    async def story(kubectl, api):
        made = pod("counts")
        made["spec"]["nodeName"] = "n"
        await api.create(objects.POD, made)
        status = {"extendedResourceClaimStatus": {"resourceClaimName": "counts-gpus"}}
        await api.patch(objects.POD, "counts", "default", {"status": status}, subresource="status")
        where = {"metadata": {"name": "counts-gpus", "namespace": "default"}}
        await api.create(objects.RESOURCE_CLAIM, {**where, "spec": {}})
        results = [
            {"request": "r", "driver": "gpu.nvidia.com", "pool": "n", "device": f"gpu-{n}"} for n in (1, 2)
        ]
        status = {"allocation": {"devices": {"results": results}}}
        await api.patch(
            objects.RESOURCE_CLAIM, "counts-gpus", "default", {"status": status}, subresource="status"
        )
        assert (await kubectl.typed(listed))[:2] == (0, "default counts counts-gpus\n"), "and not the pod p"
        assert (await kubectl.typed(devices))[:2] == (0, "gpu-1 gpu-2")
        # A disruption budget that allows no disruption now.
        forbidden = RequestFault(verb="delete", resource="pods", code=429, reason="TooManyRequests")
        kubectl.kube.faults.add(forbidden)
        code, _, errors = await kubectl.typed(evict)
        assert (code, "TooManyRequests" in errors) == (1, True)
        assert await api.get(objects.POD, "counts", "default")
        kubectl.kube.faults.clear()
        assert (await kubectl.typed(evict))[0] == 0
        left = [
            item["metadata"]["name"] for item in (await api.list(objects.POD)).items if not is_ending(item)
        ]
        assert left == ["p"]

    played(tmp_path, story)


def is_ending(item):
    return "deletionTimestamp" in item["metadata"]


def test_objects_are_created_patched_edited_and_deleted(tmp_path, monkeypatch):
    async def story(kubectl, api):
        await kubectl("create", "namespace", "x")
        await kubectl("create", "configmap", "c", "--from-literal=a=old", "-n", "x")
        await kubectl("create", "secret", "generic", "s", "--from-literal=a=b", "-n", "x")
        await kubectl("patch", "configmap", "c", "-n", "x", "-p", '{"data": {"b": "1"}}')
        await kubectl("patch", "configmap", "c", "-n", "x", "--type=merge", "-p", '{"data": {"d": "2"}}')
        removal = '[{"op": "remove", "path": "/data/d"}]'
        await kubectl("patch", "configmap", "c", "-n", "x", "--type=json", "-p", removal)
        monkeypatch.setenv("EDITOR", "sed -i s/old/new/")
        await kubectl("edit", "configmap", "c", "-n", "x")
        assert (await api.get(objects.CONFIG_MAP, "c", "x"))["data"] == {"a": "new", "b": "1"}
        assert (await api.get(objects.SECRET, "s", "x"))["data"] == {"a": "Yg=="}
        assert "Active" in await kubectl("get", "namespace", "x")
        await kubectl("delete", "namespace", "x")
        with pytest.raises(NotFound):
            await api.get(objects.CONFIG_MAP, "c", "x")

    played(tmp_path, story)


def test_a_changed_object_is_applied_by_the_client_and_then_by_the_server(tmp_path):
    async def story(kubectl, api):
        assert "created" in await kubectl("apply", "-f", kubectl.file(pod("q")))
        assert "unchanged" in await kubectl("apply", "-f", kubectl.file(pod("q")))
        assert "configured" in await kubectl("apply", "-f", kubectl.file(pod("q", "other")))
        code, shown, _ = await kubectl.tried("diff", "-f", kubectl.file(pod("q", "third")))
        assert (code, "+  - image: third" in shown) == (1, True)
        # The fields that kubectl applied before are handed over, so there is no conflict.
        applied = kubectl.file(pod("q", "third"))
        assert "serverside-applied" in await kubectl("apply", "--server-side", "-f", applied)
        found = await api.get(objects.POD, "q", "default")
        assert found["spec"]["containers"][0]["image"] == "third"
        managers = [field["manager"] for field in found["metadata"]["managedFields"]]
        assert set(managers) == {"kubectl", "kubectl-last-applied"}

    played(tmp_path, story)


def test_a_custom_resource_takes_a_merge_patch_and_no_strategic_one(tmp_path):
    domain = {
        "apiVersion": objects.COMPUTE_DOMAIN.api_version,
        "kind": "ComputeDomain",
        "metadata": {"name": "d", "namespace": "default"},
        "spec": {"numNodes": 2, "channel": {"resourceClaimTemplate": {"name": "t"}}},
    }

    async def story(kubectl, api):
        await kubectl("apply", "-f", kubectl.file(domain))
        patch = ("patch", "computedomain", "d", "-p", '{"metadata": {"labels": {"a": "1"}}}')
        code, _, errors = await kubectl.tried(*patch)
        assert (code, "unknown format: application/strategic-merge-patch+json" in errors) == (1, True)
        await kubectl(*patch, "--type=merge")
        shown = (await kubectl("get", "computedomains", "-A")).splitlines()[0].split()
        columns = domain_crds()[0]["spec"]["versions"][0]["additionalPrinterColumns"]
        narrow = [column["name"].upper() for column in columns if not column.get("priority")]
        assert shown == ["NAMESPACE", "NAME", *narrow]

    played(tmp_path, story)


def test_what_is_read_has_its_columns(tmp_path):
    async def story(kubectl, api):
        spec = {"devices": {"requests": [{"name": "g", "exactly": {"deviceClassName": "c"}}]}}
        claim = {"metadata": {"name": "c", "namespace": "default"}, "spec": spec}
        await api.create(objects.RESOURCE_CLAIM, claim)
        assert (await kubectl("get", "resourceclaims")).split()[:5] == [
            "NAME",
            "STATE",
            "AGE",
            "c",
            "pending",
        ]
        held = {"allocation": {"devices": {}}, "reservedFor": [{"resource": "pods", "name": "p", "uid": "u"}]}
        await api.patch(objects.RESOURCE_CLAIM, "c", "default", {"status": held}, subresource="status")
        assert "allocated,reserved" in await kubectl("get", "resourceclaims")
        shown = (await kubectl("get", "pods", "-o", "wide")).split()
        assert {"READY", "STATUS", "RESTARTS", "IP", "NODE", "0/1", "n"} <= set(shown)
        assert "c" in await kubectl("get", "resourceclaim", "c", "--sort-by=.metadata.name", "-o", "name")
        errors = await kubectl.tried("get", "pods", "-w", "--request-timeout=2")
        assert "READY" in errors[1]

    played(tmp_path, story)


def test_what_cannot_be_scaled_is_not(tmp_path):
    async def story(kubectl, api):
        template = {"spec": {"restartPolicy": "Never", "containers": [{"name": "c", "image": "i"}]}}
        job = {"metadata": {"name": "j", "namespace": "default"}, "spec": {"template": template}}
        await api.create(objects.JOB, job)
        code, _, errors = await kubectl.tried("scale", "job/j", "--replicas=2")
        assert (code, "could not find the requested resource" in errors) == (1, True)

    played(tmp_path, story)


def test_of_simulated_containers_kubectl_says_what_there_is_instead(tmp_path):
    async def story(kubectl, api):
        for words, lacking in (
            (("logs", "p"), "write no log"),
            (("exec", "p", "--", "ls"), "run no command"),
        ):
            code, printed, errors = await kubectl.tried(*words)
            assert (code, printed) == (1, "")
            assert f"the containers of pod p are simulated and {lacking}: `kubectl describe pod p`" in errors

    played(tmp_path, story)


def test_our_resources_are_explained_and_others_are_not_described(tmp_path):
    async def story(kubectl, api):
        domains = await kubectl("explain", "computedomains.spec")
        assert "numNodes" in domains
        assert "does not describe its fields" in await kubectl("explain", "pod")

    played(tmp_path, story)
