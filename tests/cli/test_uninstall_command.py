"""`rackloom uninstall` as people and programs call it, against a fake API server over a socket."""

import asyncio
import json
import re
import subprocess
import sys

import pytest
from inline_snapshot import snapshot
from tests.claim.cluster.uninstall.a_cluster import (
    Cluster,
    claim_of,
    domain_of,
    pod,
    programs,
    running,
    slice_of,
    strange,
)

from rackloom.app.twin.up import served_api
from rackloom.core.cluster import names
from rackloom.core.cluster.objects import CONFIG_MAP, DEVICE_CLASS, POD

CHANGING = (
    (re.compile(r" +\d+\.\d s"), " TIME"),
    (re.compile(r"[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}"), "UID"),
    (re.compile(r"daemon-[0-9a-f]{8}\b"), "daemon-UID"),
)
INSTALLED = {
    ("Namespace", "rackloom-imex"),
    ("Namespace", "rackloom-system"),
    ("Deployment", "rackloom-controller"),
    ("Deployment", "rackloom-webhook"),
    ("DaemonSet", "rackloom-node-gpu"),
    ("MutatingWebhookConfiguration", "rackloom-webhook"),
    ("DeviceClass", "gpu.nvidia.com"),
    ("DeviceClass", "mig.nvidia.com"),
    ("ClusterRole", "rackloom-controller"),
    ("ClusterRole", "rackloom-node-gpu"),
    ("CustomResourceDefinition", "computedomains.resource.nvidia.com"),
}
"""The part of deploy/kubernetes that the steps need."""


class Command:
    """The program, and the kubeconfig of one fake cluster."""

    def __init__(self, folder):
        self.config = folder / "kubeconfig"

    async def __call__(self, *options):
        """Exit code, standard output and standard error, without the parts that differ from run to run."""
        words = [sys.executable, "-m", "rackloom.cli.main", "uninstall", "--kubeconfig", str(self.config)]
        done = await asyncio.to_thread(
            subprocess.run, [*words, *options], capture_output=True, text=True, timeout=300
        )
        printed = done.stdout
        for pattern, name in CHANGING:
            printed = pattern.sub(name, printed)
        return done.returncode, printed, done.stderr


def played(tmp_path, story):
    async def run():
        cluster, command = Cluster(), Command(tmp_path)
        try:
            async with served_api(cluster.kube, "admin", command.config):
                await story(cluster, command)
        finally:
            await cluster.end()

    asyncio.run(run())


@pytest.mark.slow
def test_a_plan_says_what_goes_what_blocks_it_and_what_stays(tmp_path):
    async def story(cluster, command):
        await cluster.install("base", "webhook", only=INSTALLED)
        await programs(cluster, "webhook", "node-gpu")
        await domain_of(cluster, "cd")
        await slice_of(cluster, names.GPU_DRIVER, "n0", by=f"rackloom-{names.GPU_DRIVER}")
        await claim_of(cluster, await running(cluster, pod("train", "team")), driver=names.GPU_DRIVER)
        await cluster.put(CONFIG_MAP, strange("notes", "rackloom-system"))
        code, printed, complaint = await command()
        assert (code, complaint) == (1, "")
        assert printed == snapshot("""\
 1 webhooks     delete the admission webhooks
                MutatingWebhookConfiguration rackloom-webhook
 2 domains      delete the ComputeDomains and their IMEX daemons
                ComputeDomain team/cd
 3 controller   stop the controller and the webhook
                Deployment (2), Pod rackloom-system/webhook-0
 4 classes      delete the device classes, so that nothing new is allocated
                DeviceClass (2)
 5 plugins      stop the node plugins
                DaemonSet rackloom-system/rackloom-node-gpu, Pod rackloom-system/node-gpu-0
 6 devices      withdraw the published devices
                ResourceSlice n0-gpu.nvidia.com
 7 objects      delete rights, policies and what else was installed
                ClusterRole (2)
 8 definitions  delete the custom resource definitions
                CustomResourceDefinition computedomains.resource.nvidia.com
 9 namespaces   delete the namespaces
                Namespace rackloom-imex

blocked: Pod team/train holds devices of gpu.nvidia.com, which only its node plugin can take back
  fix: kubectl delete pod -n team train

stays:
  Namespace rackloom-system: holds what is not ours: ConfigMap rackloom-system/notes
    kubectl delete namespace rackloom-system takes all of that along
""")
        code, printed, complaint = await command("--yes")
        assert (code, complaint) == (1, "")
        assert printed == snapshot("""\
held         webhooks     MutatingWebhookConfiguration rackloom-webhook
not begun: domains, controller, classes, plugins, devices, objects, definitions, namespaces

blocked: Pod team/train holds devices of gpu.nvidia.com, which only its node plugin can take back
  fix: kubectl delete pod -n team train

stays:
  Namespace rackloom-system: holds what is not ours: ConfigMap rackloom-system/notes
    kubectl delete namespace rackloom-system takes all of that along
""")
        await cluster.user.delete(POD, "train", "team", grace_seconds=0)
        code, printed, complaint = await command("--yes")
        assert (code, complaint) == (0, "")
        assert printed == snapshot("""\
ok TIME  webhooks     MutatingWebhookConfiguration rackloom-webhook
ok TIME  domains      ComputeDomain team/cd, Pod rackloom-imex/daemon-UID, DaemonSet
                          rackloom-imex/computedomain-daemon-UID,
                          ResourceClaimTemplate (2), Secret
                          rackloom-imex/computedomain-imex-UID,
                          Node node-of-cd
ok TIME  controller   Deployment (2), Pod rackloom-system/webhook-0
ok TIME  remains      ComputeDomainClique
                          rackloom-imex/UID.UID.1
ok TIME  classes      DeviceClass (2)
ok TIME  plugins      DaemonSet rackloom-system/rackloom-node-gpu, Pod
                          rackloom-system/node-gpu-0
ok TIME  devices      ResourceSlice n0-gpu.nvidia.com
ok TIME  objects      ClusterRole (2)
ok TIME  definitions  CustomResourceDefinition computedomains.resource.nvidia.com
ok TIME  namespaces   Namespace rackloom-imex
what was to be removed is gone

stays:
  Namespace rackloom-system: holds what is not ours: ConfigMap rackloom-system/notes
    kubectl delete namespace rackloom-system takes all of that along
""")
        assert not cluster.kube.store.all(DEVICE_CLASS)

    played(tmp_path, story)


@pytest.mark.slow
def test_json_and_yaml_have_every_object(tmp_path):
    async def story(cluster, command):
        await cluster.install("base")
        code, printed, _ = await command("-o", "json")
        plan = json.loads(printed)
        assert (code, plan["blocked"]) == (0, False)
        objects = [name for step in plan["steps"] for name in step["objects"]]
        assert len(objects) == len(set(objects)) > 50
        code, printed, _ = await command("-o", "yaml")
        assert printed.startswith("blocked: false\n")
        code, printed, _ = await command("--yes", "-o", "json")
        outcome = json.loads(printed)
        assert code == 0
        assert sorted(name for step in outcome["done"] for name in step["objects"]) == sorted(objects)
        assert outcome["rest"]["steps"] == []
        code, printed, _ = await command()
        assert (code, printed) == (0, "nothing of Rackloom is here to remove\n")

    played(tmp_path, story)


@pytest.mark.slow
def test_a_token_that_is_not_accepted_is_told_and_not_shown(tmp_path):
    async def story(cluster, command):
        config = json.loads(command.config.read_text())
        config["users"][0]["user"]["token"] = "secret-of-mine"
        command.config.write_text(json.dumps(config))
        code, printed, complaint = await command()
        assert (code, printed) == (1, "")
        assert complaint == snapshot("""\
rackloom: the API server does not accept this account: Unauthorized
  fix: use a kubeconfig of an administrator of the whole cluster
""")

    played(tmp_path, story)


def test_a_server_that_is_not_there_is_told(tmp_path):
    async def story(cluster, command):
        config = json.loads(command.config.read_text())
        config["clusters"][0]["cluster"]["server"] = "https://127.0.0.1:1"
        command.config.write_text(json.dumps(config))
        code, printed, complaint = await command("--yes")
        assert (code, printed) == (1, "")
        assert complaint.startswith("rackloom: the API server was not reached: ")
        assert "Traceback" not in complaint

    played(tmp_path, story)
