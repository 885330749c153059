"""What a terminal shows while something takes its time: how much is done, how fast, and what is left."""

import io
from contextlib import redirect_stderr

import pytest

from rackloom.cli import common


class Stream(io.StringIO):
    """Standard error: a terminal, or a file."""

    def __init__(self, *, is_terminal: bool) -> None:
        super().__init__()
        self._is_terminal = is_terminal

    def isatty(self) -> bool:
        return self._is_terminal


def shown(
    monkeypatch: pytest.MonkeyPatch, items: str, *, is_terminal: bool = True, quiet: bool = False
) -> str:
    """What is shown while each look at the clock is 0.6 s later than the one before."""
    now = iter(range(100))
    run = common.with_common_flags(lambda: list(common.with_progress(items, "letters")))
    with redirect_stderr(Stream(is_terminal=is_terminal)) as stream, monkeypatch.context() as patch:
        patch.setattr(common.time, "monotonic", lambda: 0.6 * next(now))
        assert run(quiet=quiet) == list(items)
    return stream.getvalue()


def test_it_is_shown_after_a_second_and_cleared_at_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    assert shown(monkeypatch, "abcdef").split("\r\x1b[K") == [
        "",
        "1 of 6 letters (0.8 a second, about 6 s left)",
        "3 of 6 letters (1.2 a second, about 2 s left)",
        "5 of 6 letters (1.4 a second, about 1 s left)",
        "",
    ]


def test_what_is_done_at_once_is_quiet_or_goes_to_a_file_shows_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert shown(monkeypatch, "a") == ""
    assert shown(monkeypatch, "abcdef", quiet=True) == ""
    assert shown(monkeypatch, "abcdef", is_terminal=False) == ""
