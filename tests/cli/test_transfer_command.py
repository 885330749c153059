import json
from pathlib import Path

import pytest

from rackloom.cli.transfer import app, parse_address, parse_size, read_secret
from rackloom.errors import Refused
from rackloom.prove.transfer.memory import missing
from rackloom.prove.transfer.values import AlignmentReport


def call(*words: str) -> object:
    return app(list(words), result_action="return_value", exit_on_error=False)


@pytest.mark.parametrize(
    ("text", "size"),
    [("4096", 4096), ("64MiB", 64 << 20), ("1GiB", 1 << 30), ("1 gb", 10**9), ("2kib", 2048), ("7B", 7)],
)
def test_sizes_are_read_with_their_units(text: str, size: int) -> None:
    assert parse_size(text) == size


@pytest.mark.parametrize("text", ["", "MiB", "-1", "1.5GiB", "1TB", "0x10", "1GiB1"])
def test_what_is_no_size_is_refused(text: str) -> None:
    with pytest.raises(Refused, match="is not a size"):
        parse_size(text)


def test_addresses_need_host_and_port() -> None:
    assert parse_address("10.0.0.1:5555") == ("10.0.0.1", 5555)
    assert parse_address("[fd00::1]:5555") == ("fd00::1", 5555)
    for text in ("10.0.0.1", ":5555", "10.0.0.1:", "10.0.0.1:http", "10.0.0.1:70000"):
        with pytest.raises(Refused, match="HOST:PORT"):
            parse_address(text)


def test_the_secret_comes_from_a_file_or_the_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("RACKLOOM_TRANSFER_SECRET", raising=False)
    with pytest.raises(Refused, match="no shared secret"):
        read_secret(None)
    monkeypatch.setenv("RACKLOOM_TRANSFER_SECRET", "from the environment")
    assert read_secret(None) == "from the environment"
    (tmp_path / "secret").write_text("from the file\n")
    assert read_secret(tmp_path / "secret") == "from the file"
    with pytest.raises(Refused, match="cannot be read"):
        read_secret(tmp_path / "absent")


def test_emulation_does_not_take_devices_or_a_target() -> None:
    for words in (["--target", "10.0.0.1:1"], ["--net-device", "lo"], ["--transport", "tcp"]):
        with pytest.raises(Refused, match="--emulate makes both ends"):
            call("run", "--emulate", *words)


def test_nonsense_sizes_do_not_start_anything() -> None:
    with pytest.raises(Refused, match="block size: 0"):
        call("run", "--block-size", "0")


@pytest.mark.nixl
@pytest.mark.skipif(missing() is not None, reason=str(missing()))
def test_a_run_prints_a_result_line_and_a_verdict(capsys: pytest.CaptureFixture[str]) -> None:
    small = ("--block-size", "256KiB", "--iters", "2", "--warmup", "0", "--runs", "1")
    assert call("run", *small, "--transport", "tcp", "--net-device", "lo") == 0
    lines = capsys.readouterr().out.splitlines()
    result = json.loads(lines[0].removeprefix("RESULT "))
    assert result["verified"] is True
    assert result["block_size"] == 256 << 10
    assert lines[3].split()[:2] == ["plain", "lo"]
    assert lines[-1].startswith("data verified, path proved")


def test_a_promise_that_breaks_is_exit_code_1(monkeypatch: pytest.MonkeyPatch) -> None:
    broken = AlignmentReport(emulated=False, label="here", proved=False, verdict="swapped")
    monkeypatch.setattr("rackloom.prove.transfer.run.run_plain", lambda *_, **__: broken)
    assert call("run", "--net-device", "lo") == 1


def test_json_is_one_document(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    fine = AlignmentReport(emulated=True, label="here", proved=True, verdict="fine")
    monkeypatch.setattr("rackloom.prove.transfer.run.run_alignment", lambda *_, **__: fine)
    assert call("run", "--emulate", "-o", "json") == 0
    assert json.loads(capsys.readouterr().out)["verdict"] == "fine"
