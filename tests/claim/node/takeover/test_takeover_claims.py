"""The claims of NVIDIA's driver that are taken over, their new form, and the reasons against others."""

from pathlib import Path

import pytest
from tests.claim.node.takeover.nvidia_files import (
    ABORTED,
    STARTED,
    checkpoint_file,
    gpu_claim,
    gpu_config,
    imex_claim,
    status,
)

from rackloom.claim.node.plugin import CheckpointEntry, PrepareState, ReadyDevice
from rackloom.claim.node.takeover.claims import (
    Fate,
    NvidiaInstallation,
    Release,
    give_back_claim,
    take_over_claim,
)
from rackloom.claim.node.takeover.nvidia_checkpoint import decode_nvidia_checkpoint
from rackloom.core.cluster.claims import ClaimRef
from rackloom.core.cluster.names import GPU_DRIVER, IMEX_DRIVER

INSTALLED = NvidiaInstallation(namespace="nvidia", has_module=True)
HELD = {"u": ClaimRef(namespace="default", name="claim-u", uid="u")}
CUT_OFF = "its prepare was cut off, and NVIDIA's driver may have set up sharing or bound a GPU to vfio-pci"
NO_ALLOCATION = {"reservedFor": []}


def decoded(claim, **layout):
    return decode_nvidia_checkpoint(checkpoint_file({"u": claim}, **layout), Path("checkpoint.json"))


def moved(driver, claim, known=HELD, **layout):
    return take_over_claim(driver, decoded(claim, **layout).claims["u"], known, INSTALLED)


@pytest.mark.parametrize("kind", ["channel", "daemon"])
def test_a_prepared_claim_keeps_the_devices_that_kubelet_knows(kind):
    move, entry = moved(IMEX_DRIVER, imex_claim("u", kind, "cd-7"), known={})
    ids = (f"k8s.{IMEX_DRIVER}/claim=u-{kind}-0",)
    ids = (f"k8s.{IMEX_DRIVER}/device=all", *ids) if kind == "daemon" else ids
    assert (move.fate, move.claim, move.devices) == (Fate.MOVED, "default/claim-u", (f"{kind}-0",))
    assert (entry.ref, entry.state, entry.record) == (
        HELD["u"],
        PrepareState.COMPLETED,
        {"kind": kind, "domain": "cd-7"},
    )
    assert entry.devices == (
        ReadyDevice(requests=("r",), pool="node-a", device=f"{kind}-0", cdi_ids=ids, kind=kind),
    )
    assert entry.fingerprint


def test_what_has_only_started_is_undone_by_its_configuration():
    _, entry = moved(IMEX_DRIVER, imex_claim("u", "channel", "cd-7", state=STARTED))
    assert (entry.state, entry.devices) == (PrepareState.STARTED, ())
    assert entry.record == {"kind": "channel", "domain": "cd-7"}


@pytest.mark.parametrize(
    "found",
    [NO_ALLOCATION, status(IMEX_DRIVER, ["channel-0"]), status(IMEX_DRIVER, ["channel-0"], {"kind": "X"})],
)
def test_nothing_is_undone_of_what_the_driver_refuses_before_it_begins(found):
    _, entry = moved(IMEX_DRIVER, imex_claim("u", "channel", state=STARTED, status=found))
    assert (entry.state, entry.record) == (PrepareState.STARTED, {})


def test_an_aborted_claim_keeps_its_time():
    claim = imex_claim("u", "channel", state=ABORTED, abortedAt="2026-01-02T03:04:05Z")
    _, entry = moved(IMEX_DRIVER, claim)
    assert (entry.state, entry.aborted_at) == (PrepareState.ABORTED, 1767323045)


def test_who_has_admin_access_or_a_share_keeps_it():
    found = status(GPU_DRIVER, ["gpu-0"], adminAccess=True)
    _, entry = moved(GPU_DRIVER, {**gpu_claim("u", "gpu-0"), "status": found})
    assert [device.admin_access for device in entry.devices] == [True]


def test_a_claim_without_a_name_gets_the_one_that_kubelet_has():
    move, entry = moved(GPU_DRIVER, gpu_claim("u", "gpu-0", "gpu-1"))
    assert (move.claim, entry.ref) == ("default/claim-u", HELD["u"])
    assert entry.record == {"sharing": {}}
    move, entry = moved(GPU_DRIVER, gpu_claim("u", "gpu-0"), known={})
    assert (move.fate, entry) == (Fate.LEFT_OUT, None)
    assert "kubelet does not hold it" in move.why
    move, entry = moved(GPU_DRIVER, gpu_claim("u", "gpu-0"), known=None)
    assert (move.fate, move.fix, entry) == (Fate.BLOCKED, "name the file by --kubelet-state", None)


@pytest.mark.parametrize(
    ("config", "state", "slices"),
    [
        (
            gpu_config("TimeSlicing", timeSlicingConfig={"interval": "Long"}),
            {"timeSliceApplied": True},
            {"GPU-gpu-0": 3},
        ),
        # Release 0.4 does not record whether they were set.
        (gpu_config("TimeSlicing"), {"mpsControlDaemonID": ""}, {"GPU-gpu-0": 0}),
        (gpu_config("TimeSlicing"), {"timeSliceApplied": False}, None),
        (None, {}, None),
        # A field that is not known here: that time slices were set counts.
        (gpu_config("TimeSlicing", phase=1), {"timeSliceApplied": True}, {"GPU-gpu-0": 0}),
        (["no object"], {}, None),
    ],
)
def test_time_slices_are_reset_when_the_claim_ends(config, state, slices):
    _, entry = moved(GPU_DRIVER, gpu_claim("u", "gpu-0", config=config, state=state))
    assert entry.record == {"sharing": {"time_slices": slices} if slices else {}}


def test_the_mps_daemon_of_nvidias_driver_is_taken_over_with_its_claim():
    state = {"mpsControlDaemonID": "u-0a1b2", "mpsApplied": True}
    move, entry = moved(GPU_DRIVER, gpu_claim("u", "gpu-0", "gpu-1", config=gpu_config("MPS"), state=state))
    assert move.fate is Fate.MOVED
    assert entry.record == {
        "sharing": {
            "exclusive": ["GPU-gpu-0", "GPU-gpu-1"],
            "adopted": [{"id": "u-0a1b2", "namespace": "nvidia"}],
        }
    }
    # The compute mode of a MIG device is that of its GPU, which NVIDIA's driver does not change for it.
    claim = gpu_claim("u", "gpu-0-mig-1g10gb-19-0", kind="mig", state=state)
    _, entry = moved(GPU_DRIVER, claim)
    assert entry.record == {"sharing": {"adopted": [{"id": "u-0a1b2", "namespace": "nvidia"}]}}


@pytest.mark.parametrize("has_module", [True, False])
def test_a_gpu_for_a_virtual_machine_is_given_back_to_nvidias_module_where_that_is_loaded(has_module):
    claim = gpu_claim("u", "gpu-vfio-0", kind="vfio", pci_address="0000:0F:00.0")
    installed = NvidiaInstallation(namespace="nvidia", has_module=has_module)
    move, entry = take_over_claim(GPU_DRIVER, decoded(claim).claims["u"], HELD, installed)
    assert move.fate is Fate.MOVED
    given_back = {name: ["0000:0f:00.0"] for name in ("passedThrough", "persistent")}
    assert entry.record == {"sharing": {}} | (given_back if has_module else {})


def test_an_mps_daemon_whose_claim_has_no_name_would_stay():
    claim = gpu_claim("u", "gpu-0", config=gpu_config("MPS"), state={"mpsControlDaemonID": "u-0a1b2"})
    move, entry = moved(GPU_DRIVER, claim, known={})
    assert (move.fate, entry) == (Fate.BLOCKED, None)
    assert move.why.endswith("its MPS daemon would stay")
    assert move.fix == "start NVIDIA's driver until it is gone"


def test_a_gpu_whose_prepare_was_cut_off_is_begun_anew():
    claim = {**gpu_claim("u", "gpu-0"), "checkpointState": STARTED, "preparedDevices": None}
    _, entry = moved(GPU_DRIVER, claim)
    assert (entry.state, entry.devices, entry.record) == (PrepareState.STARTED, (), {"sharing": {}})


def test_a_mig_device_is_taken_over():
    _, entry = moved(GPU_DRIVER, gpu_claim("u", "gpu-0-mig-1g10gb-19-0", kind="mig"))
    assert [device.kind for device in entry.devices] == ["mig"]


@pytest.mark.parametrize(
    ("driver", "claim", "why"),
    [
        (
            GPU_DRIVER,
            gpu_claim("u", "gpu-0", config=gpu_config("MPS"), state={"mpsControlDaemonID": "../../etc"}),
            "it uses MPS, and the id of its daemon is not recorded as it should be",
        ),
        (
            GPU_DRIVER,
            gpu_claim("u", "gpu-0", config=gpu_config("MPS"), state={"mpsApplied": True}),
            "it uses MPS, and the id of its daemon is not recorded as it should be",
        ),
        (
            GPU_DRIVER,
            gpu_claim("u", "gpu-vfio-0", kind="vfio"),
            "NVIDIA's driver may have bound gpu-vfio-0 to vfio-pci, and its PCI address is not recorded",
        ),
        (
            GPU_DRIVER,
            {
                **gpu_claim("u", "gpu-0", config=gpu_config("TimeSlicing")),
                "checkpointState": STARTED,
                "preparedDevices": None,
            },
            CUT_OFF,
        ),
        (
            GPU_DRIVER,
            {
                **gpu_claim("u", "gpu-0", config={**gpu_config("MPS"), "kind": "MigDeviceConfig"}),
                "checkpointState": STARTED,
                "preparedDevices": None,
            },
            CUT_OFF,
        ),
        (
            GPU_DRIVER,
            {**gpu_claim("u", "gpu-vfio-1"), "checkpointState": STARTED, "preparedDevices": None},
            CUT_OFF,
        ),
        (GPU_DRIVER, imex_claim("u", "channel"), "its device channel-0 (channel) is not known here"),
        (IMEX_DRIVER, gpu_claim("u", "gpu-0"), "its device gpu-0 (gpu) is not known here"),
        (
            IMEX_DRIVER,
            imex_claim("u", "channel", domain=""),
            "not one device of one ComputeDomain is recorded for it",
        ),
        (
            IMEX_DRIVER,
            imex_claim("u", "channel", preparedDevices=None),
            "not one device of one ComputeDomain is recorded for it",
        ),
        (
            IMEX_DRIVER,
            imex_claim(
                "u", "channel", status={"allocation": {"devices": {"results": [{"driver": IMEX_DRIVER}]}}}
            ),
            "its status cannot be read: ValidationError('Object missing required field `pool` - at `$[0]`')",
        ),
    ],
)
def test_what_cannot_be_taken_over_says_why(driver, claim, why):
    move, entry = moved(driver, claim)
    assert (move.fate, move.why, entry) == (Fate.BLOCKED, why, None)
    assert move.fix


# And back.


@pytest.mark.parametrize(
    ("states", "release"),
    [
        ([{"mpsControlDaemonID": "u-0a1b2"}], None),
        ([{"mpsControlDaemonID": "u-0a1b2"}, {}], Release.V0_5),
        ([{"mpsControlDaemonID": "u-0a1b2"}, {"mpsControlDaemonID": ""}], Release.V0_4),
    ],
)
def test_an_mps_daemon_does_not_show_the_release(states, release):
    claims = {f"u{number}": gpu_claim("u", "gpu-0", state=state) for number, state in enumerate(states)}
    original = decode_nvidia_checkpoint(checkpoint_file(claims), Path("checkpoint.json"))
    ref = ClaimRef(namespace="default", name="new", uid="new")
    device = ReadyDevice(requests=("r",), pool="node-a", device="gpu-3", cdi_ids=("a/b=c",), kind="gpu")
    record = {"sharing": {}, "uuids": {"gpu-3": "GPU-3"}}
    entry = CheckpointEntry(
        ref=ref, state=PrepareState.COMPLETED, fingerprint="", devices=(device,), record=record
    )
    move, claim = give_back_claim(GPU_DRIVER, entry, original)
    if release is None:
        assert move.fate is Fate.BLOCKED
    else:
        assert (b"mpsControlDaemonID" in claim.v2) == (release is Release.V0_4)


def given_back(driver, claim, **layout):
    original = decoded(claim, **layout)
    _, entry = take_over_claim(driver, original.claims["u"], HELD, INSTALLED)
    return give_back_claim(driver, entry, original), original


@pytest.mark.parametrize(
    ("driver", "claim"),
    [
        (IMEX_DRIVER, imex_claim("u", "channel")),
        (IMEX_DRIVER, imex_claim("u", "daemon")),
        (IMEX_DRIVER, imex_claim("u", "channel", state=STARTED)),
        (
            GPU_DRIVER,
            gpu_claim("u", "gpu-0", config=gpu_config("TimeSlicing"), state={"timeSliceApplied": True}),
        ),
        (GPU_DRIVER, gpu_claim("u", "gpu-0-mig-1g10gb-19-0", kind="mig")),
    ],
)
@pytest.mark.parametrize("boot_id", ["boot-1", ""])
def test_a_claim_that_did_not_change_goes_back_as_it_was(driver, claim, boot_id):
    (move, back), original = given_back(driver, claim, boot_id=boot_id)
    assert (move.fate, back) == (Fate.MOVED, original.claims["u"])


def test_an_aborted_claim_is_forgotten():
    (move, back), _ = given_back(IMEX_DRIVER, imex_claim("u", "channel", state=ABORTED))
    assert (move.fate, back) == (Fate.LEFT_OUT, None)
