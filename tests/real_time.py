"""Tests in real time: how they are recognised, and how CI handles a failure of one.

A test that starts processes, a browser, a cluster or a node shares the processor with them. On a busy
machine such a test can fail without a defect of the code under test. CI therefore runs it a second time. If
it then passes, the end of the run prints it as FLAKY, with the time of both tries and the load. A flaky
test is a defect of the test: fix it in a later commit. No other test runs twice, because a failure in
virtual time repeats.

One rule decides which tests are marked `real_time`: the test lies in a folder of `FOLDERS`, or its module
starts processes (`subprocess`) or waits for other processes (`tests/waiting.py`).
"""

import os
from types import ModuleType
from typing import Any

import pytest
from tests import waiting

REASON_LINES = 12
"""Of the first try's traceback: the assertion and its values stand at its end."""
FOLDERS = ("browser", "cluster", "gpu", "install", "node")


def is_in_real_time(module: ModuleType, folder: str) -> bool:
    """Whether the tests of a module depend on other processes. `folder` is the first one below `tests`."""
    if folder in FOLDERS:
        return True
    return any(
        value is waiting or getattr(value, "__name__", "") == "subprocess" or _is_waiting(value)
        for value in vars(module).values()
    )


def _is_waiting(value: object) -> bool:
    return callable(value) and getattr(value, "__module__", "") == waiting.__name__


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Mark the tests in real time, and in CI run each a second time if it fails."""
    tests = config.rootpath / "tests"
    verdicts: dict[ModuleType, bool] = {}
    for item in items:
        module = getattr(item, "module", None)
        if module is None or not item.path.is_relative_to(tests):
            continue
        if module not in verdicts:
            verdicts[module] = is_in_real_time(module, item.path.relative_to(tests).parts[0])
        if verdicts[module] or item.get_closest_marker("real_time"):
            item.add_marker(pytest.mark.real_time)
            if "CI" in os.environ:
                item.add_marker(pytest.mark.flaky(reruns=1))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Any:
    """Keep the load at each failure: the controller of a run with workers reads it from the report."""
    report = yield
    if report.failed and item.get_closest_marker("real_time"):
        report.user_properties = [*report.user_properties, ("load", round(os.getloadavg()[0], 1))]
    return report


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """Print each test that failed once and then passed."""
    passed = {report.nodeid: report for report in terminalreporter.stats.get("passed", [])}
    flaky = [report for report in terminalreporter.stats.get("rerun", []) if report.nodeid in passed]
    if not flaky:
        return
    terminalreporter.section("flaky tests")
    for report in flaky:
        load = dict(report.user_properties).get("load", "not known")
        terminalreporter.write_line(
            f"FLAKY {report.nodeid}: failed after {report.duration:.1f} s at load {load},"
            f" passed after {passed[report.nodeid].duration:.1f} s"
        )
        terminalreporter.write_line("\n".join(report.longreprtext.splitlines()[-REASON_LINES:]))
