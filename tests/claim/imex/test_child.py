"""The kept part of the output of an ended program. All of the output is passed on."""

import asyncio
import os
import signal
import sys
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rackloom.claim.imex.nvidia_imex import KEPT_ERRORS, LONGEST_LINE, LastErrors, how_it_ended, start_imex
from rackloom.errors import Refused

REFUSAL = b"""\
WARNING: failed to open IMEX log file  errno = No such file or directory
INFO: using stderr for IMEX logging
[Sep 18 2026 06:40:33] [INFO] [tid 77] IMEX version 580.159.04 is running with the following options:
[Sep 18 2026 06:40:33] [INFO] [tid 77] IMEX library communication bind port = 50000
[Sep 18 2026 06:40:34] [ERROR] [tid 77] Configured bind IP address '10.77.0.1' does not match the discovered \
IP address 'compute-domain-daemon-0000'
[Sep 18 2026 06:40:34] [ERROR] [tid 77] Validation of network configuration failed
[Sep 18 2026 06:40:34] [INFO] [tid 77] Shutting down
"""


def reason(*pieces: bytes) -> str:
    errors = LastErrors()
    for piece in pieces:
        errors.feed(piece)
    return str(errors)


def test_the_reason_is_what_was_logged_as_an_error():
    assert reason(REFUSAL) == (
        "Configured bind IP address '10.77.0.1' does not match the discovered IP address"
        " 'compute-domain-daemon-0000'; Validation of network configuration failed"
    )


def test_the_same_failure_reads_the_same_at_another_time():
    assert reason(REFUSAL.replace(b"06:40", b"07:15").replace(b"tid 77", b"tid 9")) == reason(REFUSAL)


@pytest.mark.parametrize(
    ("output", "reported"),
    [
        (b"ERROR: No matching network interface found\nbye\n", "No matching network interface found"),
        (b"nvidia-imex: error while loading shared libraries: libx.so\n", "nvidia-imex: error while"),
        (b"[a] [INFO] [b] last words\n", "last words"),
        (b"", ""),
    ],
)
def test_without_an_error_it_is_the_last_line(output, reported):
    assert reason(output).startswith(reported)
    assert bool(reason(output)) == bool(reported)


@given(st.lists(st.binary(max_size=600), max_size=20))
def test_whatever_is_written_the_reason_is_one_short_printable_line(pieces):
    reported = reason(*pieces, b"\n[now] [ERROR] \x1b[31mred\x07 and\x00 \xff more\n")
    assert reported.isprintable()
    assert len(reported) <= KEPT_ERRORS * (LONGEST_LINE + 2)
    assert "red" in reported


@given(st.integers(1, 50))
def test_it_does_not_matter_how_output_is_cut_into_pieces(size):
    pieces = [REFUSAL[at : at + size] for at in range(0, len(REFUSAL), size)]
    assert reason(*pieces) == reason(REFUSAL)


def test_a_line_without_an_end_takes_no_memory():
    errors = LastErrors()
    for _ in range(100):
        errors.feed(b"x" * 100_000)
    assert len(errors._partial) < 10_000


@pytest.mark.parametrize(
    ("code", "reported"), [(255, "exit status 255"), (-9, "killed by SIGKILL"), (-99, "killed by signal 99")]
)
def test_how_it_ended_is_told_in_words(code, reported):
    assert how_it_ended(code, "") == reported
    assert how_it_ended(code, "why") == f"{reported}: why"


def test_its_output_is_passed_on_and_its_errors_are_kept(capfdbinary):
    program = "import sys; sys.stdout.write('one\\n'); sys.stderr.write('ERROR: two'); sys.exit(255)"

    async def story() -> None:
        child = await start_imex((sys.executable, "-uc", program))
        assert await child.wait() == 255
        assert child.complaint == "two"
        child.send_signal(15)

    asyncio.run(story())
    assert capfdbinary.readouterr().err == b"one\nERROR: two"


@pytest.mark.slow
def test_a_process_that_it_leaves_behind_is_not_waited_for():
    async def story() -> None:
        child = await start_imex(("sh", "-c", "sleep 30 & echo $! >&2; exit 3"))
        began = time.monotonic()
        assert await child.wait() == 3
        assert time.monotonic() - began < 20
        os.kill(int(child.complaint), signal.SIGTERM)

    asyncio.run(story())


def test_a_program_that_is_not_there_is_refused_with_what_to_install():
    with pytest.raises(Refused, match=r"No such file.*install the nvidia-imex package"):
        asyncio.run(start_imex(("/nowhere/nvidia-imex", "-c", "x")))
