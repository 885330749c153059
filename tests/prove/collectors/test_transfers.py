"""Saved records of transfers: the newest of each GPU and device, its result, and the owner of the GPU."""

import msgspec
import pytest
from tests.core.diagnosis.healthy import healthy, pci
from tests.core.transfer.transfer_values import record, run

from rackloom.core.diagnosis.catalogue import Check
from rackloom.core.diagnosis.examination import examine
from rackloom.core.diagnosis.join import gpu_chains
from rackloom.errors import Refused
from rackloom.prove.collectors.transfers import read_transfers
from rackloom.prove.transfer.record_files import save_record
from rackloom.topology.machine import Gpu, Machine

HOST = Machine(
    name="alpha",
    note="",
    origin=(),
    gpus=(Gpu(index=0, pci_address=pci(1), uuid="GPU-0-0-1"),),
    nics=(),
)


@pytest.mark.parametrize(
    ("measured", "verdict"),
    [
        (run(48.0), "holds"),
        (run(20.0), "fails"),
        (run(48.0, carried="mlx5_3"), "fails"),
        (run(48.0, intact=False), "fails"),
    ],
)
def test_a_run_says_whether_it_kept_what_was_promised(tmp_path, measured, verdict):
    save_record(record([measured]), tmp_path / "one.json")
    (found,) = read_transfers(tmp_path)
    assert found.verdict == verdict
    assert found.reason
    assert found.node == "alpha"


def test_the_newest_of_one_gpu_and_device_counts(tmp_path):
    save_record(record([run(48.0)]), tmp_path / "b.json")
    save_record(record([run(20.0)], recorded_at="2025-01-01T00:00:00+00:00"), tmp_path / "a.json")
    assert [transfer.verdict for transfer in read_transfers(tmp_path)] == ["holds"]


def test_its_gpu_is_found_in_the_fabric_by_the_uuid_and_a_shortfall_is_a_finding(tmp_path):
    save_record(record([run(20.0, memory=f"cuda:{pci(1)}")], HOST), tmp_path / "one.json")
    snapshot = msgspec.structs.replace(healthy(racks=1, trays=2), transfers=read_transfers(tmp_path))
    (at,) = [chain for chain in gpu_chains(snapshot) if chain.transfer is not None]
    assert (at.machine.id, at.wanted.module_id) == ("m-0-0", 1)
    assert [finding.check for finding in examine(snapshot)] == [Check.TRANSFER]


def test_an_ordinal_names_no_gpu_outside_its_process(tmp_path):
    save_record(record([run(48.0, memory="cuda:0")], HOST), tmp_path / "one.json")
    (found,) = read_transfers(tmp_path)
    assert found.key.gpu_uuid is None
    assert found.key.pci_address is None


def test_a_file_that_is_no_record_is_refused_by_name(tmp_path):
    (tmp_path / "x.json").write_text("{}")
    with pytest.raises(Refused, match=r"x\.json"):
        read_transfers(tmp_path)


def test_a_record_without_a_time_is_refused_by_name(tmp_path):
    save_record(record([run(48.0)], recorded_at="yesterday"), tmp_path / "x.json")
    with pytest.raises(Refused, match=r"x\.json .*yesterday"):
        read_transfers(tmp_path)
