"""A cause that lasts fills no log: one line a minute, with the number of repetitions."""

import sys

import pytest
import structlog

from rackloom.app import repeated_lines
from rackloom.app.repeated_lines import WINDOW_SECONDS, RepeatedLines


class Log:
    """The lines written for the events, at the times that the test chooses."""

    def __init__(self):
        self.now = 0.0
        self.written = []
        self._limit = RepeatedLines(lambda: self.now)

    def event(self, method, **event):
        try:
            self.written.append(self._limit(None, method, event))
        except structlog.DropEvent:
            return False
        return True


@pytest.fixture
def log():
    return Log()


def test_the_same_cause_is_written_once_and_counted(log):
    for _ in range(100):
        log.event("error", event="store.unavailable", reason="no room")
        log.now += 1.0
    assert log.written == [
        {"event": "store.unavailable", "reason": "no room"},
        {"event": "store.unavailable", "reason": "no room", "repeated": WINDOW_SECONDS - 1},
    ]


def test_another_cause_object_or_level_is_another_line(log):
    lines = [
        ("warning", {"event": "domain.unknown", "endpoint": "a", "reason": "x"}),
        ("warning", {"event": "domain.unknown", "endpoint": "b", "reason": "x"}),
        ("warning", {"event": "domain.unknown", "endpoint": "a", "reason": "y"}),
        ("error", {"event": "domain.unknown", "endpoint": "a", "reason": "x"}),
    ]
    assert all(log.event(method, **event) for method, event in lines)
    assert not any(log.event(method, **event) for method, event in lines)


def test_steps_that_happened_are_all_written(log):
    assert all(log.event("info", event="operation", id="1") for _ in range(3))


@pytest.mark.parametrize("given", [lambda error: error, lambda _: True, lambda _: sys.exc_info()])
def test_exceptions_are_the_same_by_type_and_text(log, given):
    outcomes = []
    for error in (ValueError("a"), ValueError("a"), ValueError("b"), KeyError("a")):
        try:
            raise error
        except Exception as raised:
            outcomes.append(log.event("error", event="defect", exc_info=given(raised)))
    assert outcomes == [True, False, True, True]


def test_causes_are_not_remembered_without_end(log, monkeypatch):
    monkeypatch.setattr(repeated_lines, "MOST_CAUSES", 2)
    for reason in ("a", "b", "c"):
        assert log.event("error", event="e", reason=reason)
    assert log.event("error", event="e", reason="a")
    assert not log.event("error", event="e", reason="c")
