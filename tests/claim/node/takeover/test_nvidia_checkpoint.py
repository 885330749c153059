"""The format of NVIDIA's checkpoint: its content, its checksums, and files that must not be believed."""

import json
from contextlib import suppress
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.claim.node.takeover.nvidia_files import (
    ABORTED,
    STARTED,
    checkpoint_file,
    go,
    gpu_claim,
    imex_claim,
)

from rackloom.claim.node.plugin import PrepareState
from rackloom.claim.node.takeover.nvidia_checkpoint import (
    decode_nvidia_checkpoint,
    encode_nvidia_checkpoint,
    go_checksum,
    is_nvidia_checkpoint,
)
from rackloom.core.cluster.names import GPU_DRIVER, IMEX_DRIVER
from rackloom.errors import Refused

HERE = Path("/plugins/checkpoint.json")
CLAIMS = {
    "u-channel": imex_claim("u-channel", "channel"),
    "u-daemon": imex_claim("u-daemon", "daemon"),
    "u-started": imex_claim("u-started", "channel", state=STARTED),
    "u-aborted": imex_claim("u-aborted", "channel", state=ABORTED, abortedAt="2026-01-02T03:04:05Z"),
}
FILE = checkpoint_file(CLAIMS)


def test_checksums_are_those_of_kubelets_checkpoint_manager():
    # Printed by the driver's own code (release 0.5 in development, August 7, 2026).
    assert go_checksum(b'{"checksum":0,"v1":{}}') == 1083090442


def test_what_the_driver_wrote_is_read():
    found = decode_nvidia_checkpoint(FILE, HERE)
    assert (found.has_v1, found.has_v2, found.boot_id) == (True, True, "boot-1")
    states = {uid: claim.state for uid, claim in found.claims.items()}
    assert states == {
        "u-channel": PrepareState.COMPLETED,
        "u-daemon": PrepareState.COMPLETED,
        "u-started": PrepareState.STARTED,
        "u-aborted": PrepareState.ABORTED,
    }
    (device,) = found.claims["u-daemon"].devices
    assert (device.kind, device.device, device.cdi_ids) == (
        "daemon",
        "daemon-0",
        (f"k8s.{IMEX_DRIVER}/device=all", f"k8s.{IMEX_DRIVER}/claim=u-daemon-daemon-0"),
    )
    assert found.claims["u-aborted"].aborted_at == 1767323045
    (gpu,) = (
        decode_nvidia_checkpoint(checkpoint_file({"g": gpu_claim("g", "gpu-3")}), HERE).claims["g"].devices
    )
    assert (gpu.kind, gpu.uuid, gpu.cdi_ids) == ("gpu", "GPU-gpu-3", (f"k8s.{GPU_DRIVER}/claim=g-gpu-3",))


@pytest.mark.parametrize("parts", ["v1 v2", "v1"])
@pytest.mark.parametrize("boot_id", ["boot-1", ""])
@pytest.mark.parametrize("claims", [{}, CLAIMS, {"g": gpu_claim("g", "gpu-0", "gpu-1")}])
def test_what_was_read_is_written_byte_for_byte(parts, boot_id, claims):
    written = checkpoint_file(claims, boot_id, parts)
    assert is_nvidia_checkpoint(written)
    assert encode_nvidia_checkpoint(decode_nvidia_checkpoint(written, HERE)) == written


def test_the_part_v1_alone_has_the_claims_that_are_prepared():
    found = decode_nvidia_checkpoint(checkpoint_file(CLAIMS, parts="v1"), HERE)
    assert set(found.claims) == {"u-channel", "u-daemon"}
    assert {(claim.state, claim.name) for claim in found.claims.values()} == {(PrepareState.COMPLETED, "")}


@given(st.integers(0, len(FILE) - 1), st.integers(1, 255))
def test_no_damage_goes_unnoticed(at, flip):
    damaged = bytes([*FILE[:at], FILE[at] ^ flip, *FILE[at + 1 :]])
    with suppress(Refused):
        found = decode_nvidia_checkpoint(damaged, HERE)
        assert found == decode_nvidia_checkpoint(FILE, HERE)


@given(st.integers(0, len(FILE) - 1))
def test_a_file_that_ends_early_is_refused(cut):
    with pytest.raises(Refused, match=f"checkpoint {HERE} of NVIDIA's driver cannot be read"):
        decode_nvidia_checkpoint(FILE[:cut], HERE)


def changed(**parts):
    return go({**json.loads(FILE), **parts})


@pytest.mark.parametrize(
    ("data", "what"),
    [
        (changed(checksum=7), r"its part v1 has checksum \d+, but 7 was written"),
        (
            changed(v2={**json.loads(FILE)["v2"], "checksum": 8}),
            r"its part v2 has checksum \d+, but 8 was written",
        ),
        (changed(v3={}), "Object contains unknown field `v3`"),
        (
            checkpoint_file({"u": imex_claim("u", "channel", state="PrepareDreamt")}),
            "claim u: Invalid enum value 'PrepareDreamt'",
        ),
        # As release 25.3.0-rc.2 wrote it.
        (checkpoint_file({"u": []}, parts="v2"), "claim u: Expected `object`, got `array`"),
    ],
)
def test_what_is_wrong_is_named_with_what_to_do(data, what):
    with pytest.raises(
        Refused, match=f"checkpoint {HERE} of NVIDIA's driver cannot be read: {what}"
    ) as refused:
        decode_nvidia_checkpoint(data, HERE)
    assert refused.value.nearest_fix == (
        "start NVIDIA's driver on this node again, whose log says more; or drain the node and move"
        f" {HERE} away"
    )


@pytest.mark.parametrize("cut", [12, 13, 500, len(FILE)])
def test_a_file_is_known_by_its_beginning(cut):
    assert is_nvidia_checkpoint(FILE[:cut]) is (cut > 12)
    assert is_nvidia_checkpoint(json.dumps(json.loads(FILE), indent=1).encode())


@pytest.mark.parametrize("data", [b"", b"{", b"[]", b"{}", b'{"checksum":"x","v1":{}}', b"\xff"])
def test_other_files_are_not_taken_for_one(data):
    assert not is_nvidia_checkpoint(data)


def test_the_driver_reads_what_the_tests_take_for_its_files(read_by_driver, tmp_path):
    file = tmp_path / "checkpoint.json"
    for driver, claims in (
        (IMEX_DRIVER, CLAIMS),
        (GPU_DRIVER, {"g": gpu_claim("g", "gpu-0")}),
        (IMEX_DRIVER, {}),
    ):
        for parts in ("v1 v2", "v1"):
            file.write_bytes(checkpoint_file(claims, parts=parts))
            kept = {uid: claim["checkpointState"] for uid, claim in claims.items()}
            if parts == "v1":
                kept = {uid: state for uid, state in kept.items() if state == "PrepareCompleted"}
            assert read_by_driver(driver, file) == kept
    file.write_bytes(changed(checksum=7))
    with pytest.raises(AssertionError, match="checkpoint is corrupted"):
        read_by_driver(IMEX_DRIVER, file)
