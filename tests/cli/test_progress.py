"""The progress line of a terminal during slow work: the amount done, the rate, and the rest."""

import io
import os
import pty
import socketserver
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr, suppress
from pathlib import Path

import msgspec
import pytest
from tests.core.diagnosis.healthy import healthy

from rackloom.cli import admin_import, common
from rackloom.core.diagnosis.examination import examine, steps_of
from rackloom.core.takeover.records import PauseDomain

CLEARED = "\r\x1b[K"
PATIENCE = 60.0


class Stream(io.StringIO):
    """Standard error: a terminal, or a file. `written` is set whenever something was."""

    def __init__(self, *, is_terminal: bool) -> None:
        super().__init__()
        self._is_terminal = is_terminal
        self.written = threading.Event()

    def isatty(self) -> bool:
        return self._is_terminal

    def write(self, text: str) -> int:
        length = super().write(text)
        self.written.set()
        return length


def until_written(stream: Stream) -> None:
    stream.written.clear()
    assert stream.written.wait(PATIENCE)


@pytest.fixture
def _often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(common, "_PROGRESS_SECONDS", 0.01)


@pytest.mark.usefixtures("_often")
def test_it_is_shown_while_it_lasts_and_cleared_at_the_end() -> None:
    with redirect_stderr(Stream(is_terminal=True)) as stream:
        for _ in common.with_progress("ab", "letters"):
            until_written(stream)
            until_written(stream)
    shown = stream.getvalue().split(CLEARED)
    assert shown[0] == shown[-1] == ""
    assert shown[1] == "0 of 2 letters"
    assert any(line.startswith("1 of 2 letters (") and line.endswith(" s left)") for line in shown)


@pytest.mark.usefixtures("_often")
def test_what_is_printed_beside_it_stands_on_a_line_of_its_own() -> None:
    with redirect_stderr(Stream(is_terminal=True)) as stream, common.progress("reading"):
        until_written(stream)
        common.note("a note")
        until_written(stream)
    assert f"{CLEARED}a note\n{CLEARED}reading (" in stream.getvalue()


def test_what_is_done_within_a_second_shows_nothing() -> None:
    with redirect_stderr(Stream(is_terminal=True)) as stream:
        assert list(common.with_progress("ab", "letters")) == ["a", "b"]
    assert stream.getvalue() == ""


@pytest.mark.usefixtures("_often")
@pytest.mark.parametrize(
    ("is_terminal", "flags"),
    [(False, {}), (True, {"quiet": True}), (True, {"output": "json"}), (True, {"as_json": True})],
)
def test_neither_files_nor_programs_nor_who_wants_quiet_get_any(is_terminal, flags, monkeypatch) -> None:
    monkeypatch.setattr(threading, "Thread", lambda **_: pytest.fail("a thread shows it"))

    def letters(*, output: common.Output = "table") -> list[str]:
        return list(common.with_progress("ab", "letters"))

    with redirect_stderr(Stream(is_terminal=is_terminal)) as stream:
        assert common.with_common_flags(letters)(**flags) == ["a", "b"]
    assert stream.getvalue() == ""


def test_rate_and_end_are_told_where_they_are_known() -> None:
    assert common.progress_text(3, 6, "letters", 1.5) == "3 of 6 letters (2.0 a second, about 2 s left)"
    assert common.progress_text(0, 6, "letters", 1.5) == "0 of 6 letters"
    assert common.progress_text(3, None, "letters", 1.5) == "3 letters (2.0 a second)"
    assert common.progress_text(0, None, "reading", 1.5) == "reading (2 s)"


@pytest.mark.usefixtures("_often")
def test_the_steps_of_an_import_are_counted_below_what_became_of_them(capsys) -> None:
    steps = [PauseDomain(domain="d1"), PauseDomain(domain="d2")]

    class Reply:
        state, message = "done", ""

    def answer(name, request):
        until_written(stream)
        return Reply()

    with redirect_stderr(Stream(is_terminal=True)) as stream:
        assert admin_import._run_steps(answer, Digest(), steps, undo=False, output="table") == 0
    assert "1 of 2 steps done" in stream.getvalue()
    assert [line.split()[1] for line in capsys.readouterr().out.splitlines()] == ["d1", "d2"]


class Digest:
    """The part of a plan that its steps need."""

    digest = "0" * 64


@pytest.mark.parametrize("lost", [(), ("cluster",)])
def test_the_checks_of_an_examination_are_as_many_as_is_told(lost) -> None:
    snapshot = healthy(racks=1, trays=1)
    layers = tuple(
        msgspec.structs.replace(layer, unknown_since=1.0 if layer.layer in lost else None)
        for layer in snapshot.layers
    )
    snapshot, done = msgspec.structs.replace(snapshot, layers=layers), []
    examine(snapshot, between=lambda: done.append(1))
    assert len(done) == steps_of(snapshot)


# Whole commands on a terminal.


TEMPLATE = """
apiVersion: resource.k8s.io/v1
kind: ResourceClaim
metadata: {{name: claim-{number}}}
spec:
  devices:
    requests: [{{name: gpu, exactly: {{deviceClassName: gpu.nvidia.com, count: 4}}}}]
"""
JOB = """
apiVersion: batch/v1
kind: Job
metadata: {{name: job-{number}}}
spec:
  parallelism: 9
  completions: 9
  template:
    spec:
      containers: [{{name: work, image: work, resources: {{limits: {{nvidia.com/gpu: 4}}}}}}]
"""
# The progress line appears after 2 ms, so that the test needs no slow work.
RUN = """
import sys
from rackloom.cli import common
common._PROGRESS_SECONDS = 0.002
from rackloom.cli.main import main
sys.exit(main())
"""


KUBECONFIG = """
apiVersion: v1
kind: Config
current-context: here
contexts: [{{name: here, context: {{cluster: here, user: me}}}}]
clusters: [{{name: here, cluster: {{server: "http://127.0.0.1:{port}"}}}}]
users: [{{name: me, user: {{token: none}}}}]
"""
SILENT_SECONDS = 0.5


@contextmanager
def silent_cluster() -> Iterator[int]:
    """The port of a server that keeps each client waiting, and then hangs up."""

    class HangUp(socketserver.BaseRequestHandler):
        def handle(self) -> None:
            time.sleep(SILENT_SECONDS)

    with socketserver.ThreadingTCPServer(("127.0.0.1", 0), HangUp) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield server.server_address[1]
        server.shutdown()
        thread.join()


def on_a_terminal(*arguments: str) -> tuple[str, str]:
    """A command's standard output, and its standard error on a terminal."""
    ours, theirs = pty.openpty()
    command = [sys.executable, "-c", RUN, *arguments]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=theirs, text=True) as process:
        os.close(theirs)
        shown: list[bytes] = []
        reader = threading.Thread(target=lambda: shown.extend(read_all(ours)))
        reader.start()
        assert process.stdout is not None
        printed = process.stdout.read()
        reader.join()
    os.close(ours)
    return printed, b"".join(shown).decode()


def read_all(terminal: int):
    with suppress(OSError):  # EIO: the last process that has it has ended
        while piece := os.read(terminal, 65536):
            yield piece


@pytest.fixture(scope="module")
def files(tmp_path_factory) -> Iterator[Path]:
    folder = tmp_path_factory.mktemp("files")
    claims = "---".join(TEMPLATE.format(number=number) for number in range(60))
    (folder / "claims.yaml").write_text(claims)
    (folder / "jobs.yaml").write_text("---".join(JOB.format(number=number) for number in range(60)))
    with silent_cluster() as port:
        (folder / "kubeconfig").write_text(KUBECONFIG.format(port=port))
        yield folder


@pytest.mark.slow
@pytest.mark.parametrize(
    ("command", "line"),
    [
        ("claim allocate {files}/claims.yaml --profile gb200-nvl72 --nodes 60", " of 60 claims allocated"),
        ("place {files}/jobs.yaml --profile gb200-nvl72 --racks 120", " of 60 jobs planned"),
        ("doctor --kubeconfig {files}/kubeconfig", "reading the site ("),
    ],
)
def test_a_command_tells_a_terminal_how_far_it_is_and_nobody_else(command, line, files) -> None:
    arguments = command.format(files=files).split()
    printed, shown = on_a_terminal(*arguments)
    assert line in shown, shown
    assert shown.endswith(CLEARED)
    assert CLEARED not in printed
    for flag in ("-q", "--json"):
        _, shown = on_a_terminal(*arguments, flag)
        assert CLEARED not in shown
