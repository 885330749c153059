"""DRANET on a node: its traces are found, and no NIC of a pod changes hands."""

import fcntl
import socket
from contextlib import contextmanager

import pytest

from rackloom.claim.node.plugin import CheckpointEntry, PrepareState
from rackloom.claim.node.storage import Checkpoint, StillRunning
from rackloom.claim.node.takeover.dranet import DRANET, plan_dranet, require_drained
from rackloom.claim.node.takeover.node_files import Phase
from rackloom.core.cluster.claims import ClaimRef
from rackloom.errors import Refused

NICS = {DRANET: ["pci-0000-8a-00-0"], "gpu.nvidia.com": ["gpu-0"]}


@contextmanager
def served(node):
    """A driver of dra.net, which holds no lock of Rackloom."""
    for directory in (node.home(DRANET), node.places.registry):
        directory.mkdir(parents=True, exist_ok=True)
    with socket.socket(socket.AF_UNIX) as server:
        path = node.places.registry / f"{DRANET}-reg.sock"
        server.bind(str(path))
        server.listen()
        yield path
    path.unlink()


def ours(node, *uids):
    """Our plugin has prepared these claims."""
    node.home(DRANET).mkdir(parents=True, exist_ok=True)
    checkpoint = Checkpoint(node.home(DRANET) / "checkpoint.json", node.boot_id)
    for uid in uids:
        ref = ClaimRef(namespace="default", name=f"claim-{uid}", uid=uid)
        checkpoint.put(CheckpointEntry(ref=ref, state=PrepareState.COMPLETED, fingerprint="f"))


def test_a_node_without_nics_has_nothing_to_take_over(node):
    node.set_state("u-gpu", devices={"gpu.nvidia.com": ["gpu-0"]})
    for back in (False, True):
        plan = require_drained(node.places, back=back)
        assert (plan.phase, plan.claims, plan.notes, plan.running) == (Phase.NOTHING, (), (), ())


def test_nics_in_pods_keep_dranet(node):
    node.set_state("u-nic", devices=NICS)
    with served(node) as path:
        plan = plan_dranet(node.places)
        assert (plan.phase, plan.running) == (Phase.DRANET, (f"it answers on {path}",))
        (move,) = plan.blocked
        assert (move.claim, move.devices) == ("default/claim-u-nic", ("pci-0000-8a-00-0",))
        with pytest.raises(StillRunning, match=r"claim default/claim-u-nic of dra\.net cannot") as refused:
            require_drained(node.places)
        assert "leave the driver running until they have ended" in refused.value.nearest_fix
    # Stopped too early, kubelet still holds the claim, and the NIC's home is unknown.
    with pytest.raises(StillRunning, match="DRANET moved its NIC into a pod"):
        require_drained(node.places)


def test_dranet_is_waited_for_once_its_pods_have_ended(node):
    database = node.places.dranet
    database.parent.mkdir(parents=True)
    database.write_bytes(b"bbolt")
    with served(node) as path, pytest.raises(StillRunning, match=f"DRANET still serves dra.net .*{path}"):
        require_drained(node.places)
    plan = require_drained(node.places)
    assert (plan.phase, plan.notes) == (Phase.DRANET, (f"DRANET's database {database} is left as it is",))
    assert database.read_bytes() == b"bbolt"


def test_claims_of_our_own_are_not_dranets(node):
    node.set_state("u-nic", devices=NICS)
    ours(node, "u-nic")
    assert require_drained(node.places).phase is Phase.OURS
    with pytest.raises(StillRunning, match="DRANET does not know the way back"):
        require_drained(node.places, back=True)
    node.set_state()
    assert require_drained(node.places, back=True).phase is Phase.OURS


def test_our_plugin_is_waited_for_on_the_way_back_alone(node):
    ours(node)
    with (
        served(node) as path,
        (node.home(DRANET) / "plugin.lock").open("w") as held,
    ):
        fcntl.flock(held, fcntl.LOCK_EX)
        assert require_drained(node.places).running == ()
        with pytest.raises(StillRunning, match=f"Rackloom still serves dra.net .*{path}"):
            require_drained(node.places, back=True)


def test_without_kubelets_state_nothing_is_said_to_be_free(node):
    (node.root / "dra_manager_state").write_bytes(b"{")
    assert require_drained(node.places).phase is Phase.NOTHING
    with served(node):
        (note,) = plan_dranet(node.places).notes
        assert "which NICs are in pods is not known" in note
        with pytest.raises(Refused, match="cannot be read") as refused:
            require_drained(node.places)
        assert refused.value.nearest_fix == "name the file by --kubelet-state"
