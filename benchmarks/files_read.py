"""How many source files a reader opens to follow one change, one claim and one gang.

python benchmarks/files_read.py [--list] [--quick]

Each story is an existing test. From the call that starts the story to the end of the test, every file of
`src/rackloom` counts in which a function is called (Python's profile hook, in all threads). The
simulators, generated code and what runs at import do not count: a reader who follows the change does not open
them. The count is an upper bound, since a function that only passes a value through counts as well.

What a process repeats in the background, such as the discovery of devices, is no part of the story, but may
happen during it. So each story runs five times, and files count that are called every time. With `--quick` it
runs once.
"""

import argparse
import sys
import threading
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


STORIES = (
    Story(
        "one change through an NVLink domain",
        "tests/carve/reconcile/test_domain_against_the_twin.py"
        "::test_a_change_wakes_the_domain_and_ready_means_seen",
        "order",
        30,
    ),
    Story(
        "one prepared GPU claim",
        "tests/claim/node/gpu/test_gpu_over_sockets.py"
        "::test_a_gpu_is_given_by_its_device_files_and_given_back",
        "work",
        20,
    ),
    Story(
        "one gang",
        "tests/claim/cluster/gangs/test_gangs_on_fake.py"
        "::test_a_gang_comes_to_one_rack_whole_and_leaves_nothing",
        "story",
        25,
    ),
)


class FilesCalled:
    """A pytest plugin: the files of functions that are called once the story has begun."""

    def __init__(self, story: Story) -> None:
        self.files: set[Path] = set()
        self._begins = (str(ROOT / story.test.partition("::")[0]), story.begins)
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
        if self._has_begun and code.co_filename not in self._noted:
            self._noted.add(code.co_filename)
            path = Path(code.co_filename)
            if is_read(path):
                self.files.add(path.relative_to(SOURCES))


def is_read(path: Path) -> bool:
    """Whether it is source code that a reader of a story opens."""
    if not path.is_relative_to(SOURCES) or "_pb2" in path.name:
        return False
    return path.relative_to(SOURCES).parts[0] != "lab"


RUNS = 5


def files_of(story: Story, runs: int) -> set[Path]:
    return set.intersection(*(files_of_run(story) for _ in range(runs)))


def files_of_run(story: Story) -> set[Path]:
    called = FilesCalled(story)
    status = pytest.main(
        ["-q", "--no-header", "-p", "no:cacheprovider", str(ROOT / story.test)], plugins=[called]
    )
    if status != pytest.ExitCode.OK or not called.files:
        raise SystemExit(f"{story.test} did not pass, or does not call {story.begins}: nothing is counted")
    return called.files


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--list", action="store_true", help="print the files, too")
    parser.add_argument("--quick", action="store_true", help="one run of each story: shows that it works")
    words = parser.parse_args()
    for story in STORIES:
        files = files_of(story, 1 if words.quick else RUNS)
        verdict = "met" if len(files) <= story.goal else "MISSED"
        print(f"{story.title}: {len(files)} files (goal {story.goal}: {verdict})")
        if words.list:
            print("".join(f"  {file}\n" for file in sorted(files)), end="")


if __name__ == "__main__":
    main()
