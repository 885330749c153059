"""How many source files a reader opens to follow one change, one claim and one gang.

python benchmarks/files_read.py [--list] [--quick]

It exits with 1 if a count exceeds its ceiling in `ceilings.toml`. Each count also has a goal. A missed goal
is printed, and fails nothing as long as the ceiling holds. `make lint` counts, too (`tools/ratchets.py`).

Each story is an existing test. From the call that starts the story to the end of the test, every file of
`src/rackloom` counts in which a function is called (Python's profile hook, in all threads). The
simulators, their calls into `core`, generated code and what runs at import do not count: a reader who follows
the change does not open them. The count is an upper bound, since a function that only passes a value through
counts as well.

A process repeats some work in the background, such as the discovery of devices. That work is no part of the
story, but may happen during it. A story names the functions that start such work, and calls below them do not
count. For other work of this kind each story runs five times, and a file counts if every run calls it. With
`--quick` a story runs again only while its count exceeds the ceiling: further runs never raise it.
"""

import argparse
import contextlib
import io
import sys
import threading
import tomllib
from pathlib import Path
from types import FrameType
from typing import Any

import msgspec
import pytest

ROOT = Path(__file__).resolve().parents[1]
SOURCES = ROOT / "src" / "rackloom"


class Story(msgspec.Struct, frozen=True):
    title: str
    test: str
    begins: str
    """The function of the test's file whose call starts the story; before it, the test sets up its site."""
    goal: int
    background: frozenset[tuple[str, str]] = frozenset()
    """Files of `src/rackloom` and their functions: calls below these belong to no story."""


STORIES = (
    Story(
        "one change through an NVLink domain",
        "tests/carve/reconcile/test_domain_against_the_twin.py"
        "::test_a_change_wakes_the_domain_and_ready_means_seen",
        "order",
        30,
        # A replica looks at intervals which endpoints are its own. A thread reads the store.
        frozenset(
            {
                ("carve/reconcile/loop.py", "_follow_share"),
                ("carve/reconcile/leases.py", "share_of_sole_replica"),
            }
        ),
    ),
    Story(
        "one prepared GPU claim",
        "tests/claim/node/gpu/test_gpu_over_sockets.py"
        "::test_a_gpu_is_given_by_its_device_files_and_given_back",
        "work",
        20,
        # The plugin observes the GPUs at intervals and waits for errors. Threads read the machine.
        frozenset(
            {
                ("claim/node/gpu/plugin.py", "_watch_gpus"),
                ("claim/node/gpu/plugin.py", "_watch_xids"),
                ("claim/node/gpu/monitor.py", "read"),
                ("claim/node/gpu/inventory.py", "wait"),
            }
        ),
    ),
    Story(
        "one gang",
        "tests/claim/cluster/gangs/test_gangs_on_fake.py"
        "::test_a_gang_comes_to_one_rack_whole_and_leaves_nothing",
        "story",
        25,
        # The client of the process drops fields that no controller reads. Here its stand-in does.
        frozenset({("core/cluster/projection.py", "project_for_control")}),
    ),
)


class FilesCalled:
    """A pytest plugin: the files of functions that are called once the story has begun."""

    def __init__(self, story: Story) -> None:
        self.files: set[Path] = set()
        self._begins = (str(ROOT / story.test.partition("::")[0]), story.begins)
        self._background = {(str(SOURCES / file), name) for file, name in story.background}
        self._has_begun = False
        self._noted: set[str] = set()

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_call(self) -> Any:
        threading.setprofile(self._note)
        sys.setprofile(self._note)
        try:
            return (yield)
        finally:
            sys.setprofile(None)
            threading.setprofile(None)

    def _note(self, frame: FrameType, event: str, argument: object) -> None:
        code = frame.f_code
        if event != "call" or code.co_name == "<module>":
            return
        self._has_begun = self._has_begun or (code.co_filename, code.co_name) == self._begins
        if not self._has_begun or code.co_filename in self._noted:
            return
        path = Path(code.co_filename)
        if not is_read(path):
            self._noted.add(code.co_filename)
        elif not self._is_background(frame) and not is_of_a_simulator(frame):
            self._noted.add(code.co_filename)
            self.files.add(path.relative_to(SOURCES))

    def _is_background(self, frame: FrameType | None) -> bool:
        # The stack of a coroutine has the coroutines that await it, up to the task.
        while frame is not None and self._background:
            if (frame.f_code.co_filename, frame.f_code.co_name) in self._background:
                return True
            frame = frame.f_back
        return False


DECISIONS = tuple(str(SOURCES / name) for name in ("core", "topology"))
SIMULATORS = tuple(str(SOURCES / "lab" / name) for name in ("kube", "nodes", "switches"))


def is_of_a_simulator(frame: FrameType | None) -> bool:
    """Whether a simulator calls a decision, for example the simulated scheduler the allocator."""
    while frame is not None and frame.f_code.co_filename.startswith(DECISIONS):
        frame = frame.f_back
    return frame is not None and frame.f_code.co_filename.startswith(SIMULATORS)


def is_read(path: Path) -> bool:
    """Whether it is source code that a reader of a story opens."""
    if not path.is_relative_to(SOURCES) or "_pb2" in path.name:
        return False
    return path.relative_to(SOURCES).parts[0] != "lab"


RUNS = 5


def files_of(story: Story, enough: int = 0) -> set[Path]:
    """The files that every run calls. Once there are `enough` files or fewer, no further run starts."""
    files = files_of_run(story)
    for _ in range(RUNS - 1):
        if len(files) <= enough:
            break
        files &= files_of_run(story)
    return files


# Plugins that import much and that no story needs.
UNUSED_PLUGINS = ("cacheprovider", "inline_snapshot", "schemathesis")


def files_of_run(story: Story) -> set[Path]:
    called, printed = FilesCalled(story), io.StringIO()
    without = [word for plugin in UNUSED_PLUGINS for word in ("-p", f"no:{plugin}")]
    with contextlib.redirect_stdout(printed):
        status = pytest.main(["-q", "--no-header", *without, str(ROOT / story.test)], plugins=[called])
    if status != pytest.ExitCode.OK or not called.files:
        raise SystemExit(
            f"{printed.getvalue()}\n"
            f"{story.test} did not pass, or does not call {story.begins}: nothing is counted"
        )
    return called.files


def ceilings() -> dict[str, int]:
    """The ceiling of each story by its title."""
    limits: dict[str, int] = tomllib.loads((ROOT / "ceilings.toml").read_text())["files_read"]
    return limits


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--list", action="store_true", help="print the files, too")
    parser.add_argument("--quick", action="store_true", help="run again only above the ceiling")
    words = parser.parse_args()
    limits, over = ceilings(), False
    for story in STORIES:
        ceiling = limits[story.title]
        files = files_of(story, enough=ceiling if words.quick else 0)
        goal = "met" if len(files) <= story.goal else "MISSED"
        verdict = "" if len(files) <= ceiling else f"; above the ceiling of {ceiling}"
        print(f"{story.title}: {len(files)} files (goal {story.goal}: {goal}{verdict})")
        over = over or len(files) > ceiling
        if words.list:
            print("".join(f"  {file}\n" for file in sorted(files)), end="")
    sys.exit(1 if over else 0)


if __name__ == "__main__":
    main()
