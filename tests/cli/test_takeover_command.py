"""`rackloom takeover plan|apply|back` as people and programs call it, on the files of a node."""

import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
from inline_snapshot import snapshot
from tests.claim.node.takeover.nvidia_files import (
    STARTED,
    Node,
    checkpoint_file,
    gpu_claim,
    gpu_config,
    imex_claim,
)

from rackloom.core.cluster.names import GPU_DRIVER, IMEX_DRIVER

MPS = gpu_claim("u-gpu", "gpu-0", config=gpu_config("MPS"), state={"mpsControlDaemonID": "u-gpu-0a1b2"})
BOUND = gpu_claim("u-gpu", "gpu-vfio-0", kind="vfio")
IMEX_FILE = checkpoint_file(
    {"u-work": imex_claim("u-work", "channel"), "u-begun": imex_claim("u-begun", "daemon", state=STARTED)}
)


class Command:
    """The program, on one node."""

    def __init__(self, node: Node) -> None:
        self.node = node
        boot_id = node.root / "proc/sys/kernel/random/boot_id"
        boot_id.parent.mkdir(parents=True)
        boot_id.write_text("boot-1\n")

    def __call__(self, *words):
        """Exit code, standard output and standard error."""
        process = self.started(*words)
        printed = process.communicate(timeout=300)
        return process.returncode, *(text.replace(str(self.node.root), "NODE") for text in printed)

    def started(self, *words):
        """The process, while it runs."""
        places = {
            "plugins": "plug",
            "registry": "reg",
            "cdi-root": "cdi",
            "kubelet-state": "dra_manager_state",
            "sysroot": "",
        }
        options = [word for name, path in places.items() for word in (f"--{name}", self.node.root / path)]
        return subprocess.Popen(
            [sys.executable, "-m", "rackloom.cli.main", "takeover", *words, *options],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, "COLUMNS": "200"},
        )


@pytest.fixture
def takeover():
    with tempfile.TemporaryDirectory(prefix="rl") as root:
        yield Command(Node(Path(root)))


@pytest.mark.slow
def test_a_node_goes_over_and_back(takeover):
    path = takeover.node.install(IMEX_FILE)
    takeover.node.add_cdi(IMEX_DRIVER, "u-work")
    code, printed, _ = takeover("plan")
    assert (code, printed) == (
        0,
        snapshot("""\
compute-domain.nvidia.com: the checkpoint is NVIDIA's
UID      CLAIM                  STATE             DEVICES    FATE
u-begun  default/claim-u-begun  PrepareStarted    -          moved
u-work   default/claim-u-work   PrepareCompleted  channel-0  moved
would: write NODE/plug/compute-domain.nvidia.com/checkpoint.nvidia.json
would: write NODE/plug/compute-domain.nvidia.com/checkpoint.json

gpu.nvidia.com: there is no checkpoint; nothing to do
"""),
    )
    assert takeover("apply") == (0, printed.replace("would:", "done:"), "")
    assert takeover("apply") == (
        0,
        snapshot("""\
compute-domain.nvidia.com: the checkpoint was taken over; nothing to do

gpu.nvidia.com: there is no checkpoint; nothing to do
"""),
        "",
    )
    code, printed, _ = takeover("plan", "--back")
    assert (code, printed) == (
        0,
        snapshot("""\
compute-domain.nvidia.com: the checkpoint was taken over
UID      CLAIM                  STATE             DEVICES    FATE
u-begun  default/claim-u-begun  PrepareStarted    -          moved
u-work   default/claim-u-work   PrepareCompleted  channel-0  moved
would: write NODE/plug/compute-domain.nvidia.com/checkpoint.json
would: delete NODE/plug/compute-domain.nvidia.com/checkpoint.nvidia.json

gpu.nvidia.com: there is no checkpoint; nothing to do
"""),
    )
    code, printed, _ = takeover("back", "-o", "json")
    assert code == 0
    (imex, gpu) = json.loads(printed)
    assert (imex["driver"], imex["phase"], len(imex["claims"]), gpu["phase"]) == (
        IMEX_DRIVER,
        "taken-over",
        2,
        "none",
    )
    assert path.read_bytes() == IMEX_FILE


def test_what_blocks_it_is_named_and_nothing_is_changed(takeover):
    takeover.node.set_state("u-gpu")
    takeover.node.install(IMEX_FILE)
    takeover.node.install(checkpoint_file({"u-gpu": BOUND}), GPU_DRIVER)
    before = takeover.node.files()
    code, printed, _ = takeover("plan", "--driver", GPU_DRIVER)
    assert (code, printed) == (
        1,
        snapshot("""\
gpu.nvidia.com: the checkpoint is NVIDIA's
UID    CLAIM                STATE             DEVICES     FATE
u-gpu  default/claim-u-gpu  PrepareCompleted  gpu-vfio-0  blocked
blocked: u-gpu: NVIDIA's driver may have bound gpu-vfio-0 to vfio-pci, and its PCI address is not recorded
  fix: end the pods that use it first
nothing is written while a claim is blocked
"""),
    )
    code, printed, error = takeover("apply")
    assert (code, printed, error) == (
        1,
        "",
        snapshot("""\
rackloom: claim default/claim-u-gpu of gpu.nvidia.com cannot be moved: NVIDIA's driver may have bound gpu-vfio-0 to vfio-pci, and its PCI address is not recorded
  fix: end the pods that use it first; nothing was changed
"""),  # noqa: E501 (lines as they are printed)
    )
    assert takeover.node.files() == before
    assert takeover("apply", "--driver", IMEX_DRIVER)[0] == 0


def test_an_mps_daemon_that_ends_with_its_claim_is_named(takeover):
    takeover.node.set_state("u-gpu")
    takeover.node.install(checkpoint_file({"u-gpu": MPS}), GPU_DRIVER)
    words = ("--driver", GPU_DRIVER, "--nvidia-namespace", "gpus")
    code, printed, _ = takeover("plan", *words)
    assert code == 0
    assert printed.count(" moved") == 1
    assert (
        "note: claim default/claim-u-gpu uses MPS: when it ends the GPU plugin deletes Deployment"
        " gpus/mps-control-daemon-u-gpu-0a1b2, and needs the right to\n"
    ) in printed
    assert takeover("apply", *words)[0] == 0
    assert takeover("back", "--driver", GPU_DRIVER)[0] == 0
    assert takeover.node.files()[f"plug/{GPU_DRIVER}/checkpoint.json"] == checkpoint_file({"u-gpu": MPS})


def test_damage_and_other_drivers_are_refused(takeover):
    takeover.node.install(IMEX_FILE[:100])
    code, printed, error = takeover("plan")
    assert (code, printed, error) == (
        1,
        "",
        snapshot("""\
rackloom: checkpoint NODE/plug/compute-domain.nvidia.com/checkpoint.json of NVIDIA's driver cannot be read: Input data was truncated
  fix: start NVIDIA's driver on this node again, whose log says more; or drain the node and move NODE/plug/compute-domain.nvidia.com/checkpoint.json away
"""),  # noqa: E501 (lines as they are printed)
    )
    assert takeover("plan", "--driver", "nic.example.com")[::2] == (
        1,
        snapshot("""\
rackloom: no takeover of driver nic.example.com is known
  fix: use compute-domain.nvidia.com or gpu.nvidia.com or dra.net
"""),
    )


@pytest.mark.slow
def test_nics_of_dranet_are_named_and_keep_it(takeover):
    takeover.node.set_state("u-nic", devices={"dra.net": ["pci-0000-8a-00-0"]})
    database = takeover.node.places.dranet
    database.parent.mkdir(parents=True)
    database.touch()
    code, printed, _ = takeover("plan")
    assert (code, printed.partition("gpu.nvidia.com: ")[2]) == (
        0,
        snapshot("""\
there is no checkpoint; nothing to do

dra.net: DRANET is or was here
UID    CLAIM                STATE             DEVICES           FATE
u-nic  default/claim-u-nic  PrepareCompleted  pci-0000-8a-00-0  blocked
blocked: u-nic: DRANET moved its NIC into a pod, and what DRANET knows of the way back is not known here
  fix: end the pods that use it, and leave the driver running until they have ended
note: DRANET's database NODE/run/dranet/dranet.db is left as it is
nothing to write
"""),
    )
    assert takeover("plan", "--driver", "dra.net")[0] == 1
    code, printed, error = takeover("apply", "--driver", "dra.net")
    assert (code, printed, error) == (
        1,
        "",
        snapshot("""\
rackloom: claim default/claim-u-nic of dra.net cannot change hands: DRANET moved its NIC into a pod, and what DRANET knows of the way back is not known here
  fix: end the pods that use it, and leave the driver running until they have ended
"""),  # noqa: E501 (lines as they are printed)
    )
    takeover.node.set_state()
    assert takeover("apply", "--driver", "dra.net") == (
        0,
        snapshot("""\
dra.net: DRANET is or was here
note: DRANET's database NODE/run/dranet/dranet.db is left as it is
nothing to write
"""),
        "",
    )


@pytest.mark.slow
def test_it_waits_for_a_plugin_that_still_runs(takeover):
    path = takeover.node.install(IMEX_FILE)
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(str(path.with_name("dra.sock")))
        server.listen()
        assert takeover("apply", "--wait", "0.1")[0] == 1
        assert path.read_bytes() == IMEX_FILE
        with takeover.started("apply", "--wait", "inf") as ended:
            assert "rackloom: waiting: a plugin of compute-domain.nvidia.com runs" in ended.stderr.readline()
            ended.terminate()
            assert ended.wait(30) == 128 + signal.SIGTERM
        assert path.read_bytes() == IMEX_FILE
        waiting = takeover.started("apply", "--wait", "inf")
        waiting.stderr.readline()
    with waiting:
        assert waiting.wait(30) == 0
    assert path.read_bytes() != IMEX_FILE
