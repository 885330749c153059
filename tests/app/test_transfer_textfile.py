"""A transfer's result as series: of each pair of ends, and nothing left of an old success."""

import itertools
from pathlib import Path

import pytest
from tests.core.transfer.transfer_values import run

from rackloom.app.transfer_textfile import transfer_registry, write_transfer_textfile
from rackloom.core.transfer.report import single_report
from rackloom.errors import Refused

ARM = {"arm": "plain", "gpu": "cpu", "device": "mlx5_0", "together": "false"}


def test_rates_and_percentiles_of_an_arm() -> None:
    runs = [run(39.0), run(41.0)]
    registry = transfer_registry(single_report("plain", runs, "here"), 1000.0)
    value = registry.get_sample_value
    assert value("rackloom_transfer_measured_seconds") == 1000.0
    assert value("rackloom_transfer_proved") == 1.0
    assert value("rackloom_transfer_emulated") == 0.0
    assert value("rackloom_transfer_rate_bytes_per_second", ARM) == pytest.approx(40e9, rel=0.01)
    assert value("rackloom_transfer_verified", ARM) == 1.0
    assert value("rackloom_transfer_short", ARM) == 0.0
    slowest = max(report.p99_seconds for report in runs)
    assert value("rackloom_transfer_request_seconds", ARM | {"quantile": "0.99"}) == slowest


@pytest.mark.parametrize(("intact", "carried"), list(itertools.product([True, False], ["mlx5_0", "mlx5_1"])))
def test_data_that_is_lost_and_a_device_that_is_not_the_promised_are_not_proved(
    intact: bool, carried: str
) -> None:
    report = single_report("plain", [run(39.0, carried=carried, intact=intact)], "here")
    value = transfer_registry(report, 0.0).get_sample_value
    assert value("rackloom_transfer_proved") == float(intact and carried == "mlx5_0")
    assert value("rackloom_transfer_verified", ARM) == float(intact)


def test_a_failure_leaves_nothing_of_the_success_before(tmp_path: Path) -> None:
    file = tmp_path / "transfer.prom"
    write_transfer_textfile(file, single_report("plain", [run(39.0)], "here"), 1.0)
    assert "rackloom_transfer_rate_bytes_per_second{" in file.read_text()
    write_transfer_textfile(file, None, 2.0)
    assert "rackloom_transfer_rate_bytes_per_second{" not in file.read_text()
    assert "rackloom_transfer_proved 0.0" in file.read_text()


def test_a_file_that_cannot_be_written_is_refused(tmp_path: Path) -> None:
    with pytest.raises(Refused, match="could not be written"):
        write_transfer_textfile(tmp_path / "nowhere/transfer.prom", None, 0.0)
