"""The whole output of a program is read, and the wait for it never exceeds the given limit."""

import asyncio
import os
import stat
from pathlib import Path

import pytest

from rackloom.errors import Retry
from rackloom.runtime.programs import ProgramResult, chroot_prefix, run_program


def ended(*command, seconds=60.0, **more):
    return asyncio.run(run_program(*command, seconds=seconds, again=3.0, **more))


def test_a_program_is_given_its_input_and_heard_out():
    script = "read word; echo $word $WHO; echo but >&2; exit 3"
    environment = {"PATH": os.environ["PATH"], "WHO": "you"}
    done = ended("sh", "-c", script, given=b"hello\n", env=environment)
    assert done == ProgramResult(3, b"hello you\n", b"but\n")
    assert done.output == "hello you\nbut"


def test_what_is_no_text_is_kept_as_it_is():
    assert ended("printf", r"\377").stdout == b"\xff"


def test_a_program_that_is_not_there_or_is_none_may_be_tried_again(tmp_path):
    text = tmp_path / "text"
    text.write_text("no program")
    text.chmod(stat.S_IRUSR)
    for name in ("no-such-program", str(text)):
        with pytest.raises(Retry, match=f"cannot run {name}") as refusal:
            ended(name)
        assert refusal.value.after == 3.0


@pytest.mark.slow
def test_a_program_that_hangs_is_killed(tmp_path):
    """It writes down its process id once it runs, and no process has that id afterwards."""
    number = tmp_path / "number"
    script = f"echo $$ > {number}; exec sleep 600"
    with pytest.raises(Retry, match="did not end in 2 s"):
        ended("sh", "-c", script, seconds=2.0)
    if number.exists():  # a busy machine may not have come as far
        with pytest.raises(ProcessLookupError):
            os.kill(int(number.read_text()), 0)


def test_what_a_program_leaves_behind_is_not_waited_for(tmp_path):
    """A daemon keeps the output of the program that started it open."""
    held = tmp_path / "held"
    try:
        assert ended("sh", "-c", f"(while [ ! -e {held} ]; do sleep 0.1; done) & echo done").output == "done"
    finally:
        held.touch()


def test_a_program_below_another_root_is_run_there():
    assert chroot_prefix(Path("/")) == ()
    assert chroot_prefix(Path("/driver-root")) == ("chroot", "/driver-root")


@pytest.mark.parametrize("script", ["head -c 20000000 /dev/zero; sleep 9", "head -c 20000000 /dev/zero >&2"])
def test_a_program_that_writes_without_end_is_not_heard_out(script):
    with pytest.raises(Retry, match="wrote more than 16 MiB"):
        ended("sh", "-c", script)


def test_what_is_no_argument_may_be_tried_again():
    with pytest.raises(Retry, match="cannot run echo: embedded null byte"):
        ended("echo", "a\0b")
