"""The traced requests that wait for an endpoint, and the passes that are linked to them."""

import asyncio
from collections.abc import AsyncIterator, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from types import SimpleNamespace
from typing import Any

import pytest

from rackloom.carve.reconcile.domain_pass import ReconcileHooks
from rackloom.carve.reconcile.loop import EndpointLoop, Reconciler
from rackloom.runtime.traces import MAX_CAUSES, Attribute, Span, SpanSide, Traces


class _Noted(Traces):
    """Notes the causes of each span."""

    def __init__(self) -> None:
        self.here: str | None = None
        self.spans: list[tuple[str, ...]] = []

    def span(
        self,
        name: str,
        side: SpanSide,
        *,
        causes: Iterable[str] | None = None,
        attributes: Mapping[str, Attribute] | None = None,
    ) -> AbstractContextManager[Span]:
        assert (name, side) == ("reconcile", SpanSide.CONSUMER)
        self.spans.append(tuple(causes or ()))
        return self._open()

    @contextmanager
    def _open(self) -> Iterator[Span]:
        yield Span()

    def current(self) -> str | None:
        return self.here


class _Work:
    """Passes with given ends. Each calls `during`."""

    def __init__(self, *ends: bool) -> None:
        self.endpoint = SimpleNamespace(id="e")
        self.domain: str | None = "d"
        self.ends = list(ends)
        self.during = lambda: None

    async def run(self) -> bool:
        self.during()
        return self.ends.pop(0)


def _loop(work: Any, traces: Traces) -> EndpointLoop:
    return EndpointLoop(work, 60.0, None, traces)


def test_a_request_is_linked_until_a_pass_converges() -> None:
    traces, work = _Noted(), _Work(False, True, True)
    loop = _loop(work, traces)
    loop.wake("org", "one")
    loop.wake("org", "two")
    loop.wake("org", "one")
    for _ in range(3):
        asyncio.run(loop._pass())
    assert traces.spans == [("one", "two"), ("one", "two"), ()]


def test_a_request_that_comes_during_a_pass_waits_for_the_next() -> None:
    traces, work = _Noted(), _Work(True, True)
    loop = _loop(work, traces)
    loop.wake("org", "one")
    work.during = lambda: loop.wake("org", "late")
    asyncio.run(loop._pass())
    work.during = lambda: None
    asyncio.run(loop._pass())
    assert traces.spans == [("one",), ("late",)]


def test_so_many_requests_wait_at_most() -> None:
    traces, work = _Noted(), _Work(True)
    loop = _loop(work, traces)
    for number in range(2 * MAX_CAUSES):
        loop.wake("org", str(number))
    asyncio.run(loop._pass())
    assert len(traces.spans[0]) == MAX_CAUSES


class _Changes:
    """A store that reports given changes."""

    is_shared = True

    def __init__(self, *changes: str | None) -> None:
        self._changes = changes

    def on_behalf_of(self, _org: str) -> "_Changes":
        return self

    async def changes(self) -> AsyncIterator[str | None]:
        for change in self._changes:
            yield change


def _reconciler(store: Any, loop: EndpointLoop, traces: Traces) -> Reconciler:
    reconciler = Reconciler(store, lambda _: None, float, holder="h", hooks=ReconcileHooks(traces=traces))  # type: ignore[arg-type,return-value]
    reconciler._workers = SimpleNamespace(loops=[loop])  # type: ignore[assignment]
    return reconciler


@pytest.mark.parametrize(
    ("changes", "causes"), [((None, "d", "d cause", "other cause2"), ("cause",)), ((None, "d"), ())]
)
def test_another_replica_says_which_request_changed_a_domain(
    changes: tuple[str | None, ...], causes: tuple[str, ...]
) -> None:
    traces = _Noted()
    work: Any = _Work(True)
    loop = _loop(work, traces)
    reconciler = _reconciler(_Changes(*changes), loop, traces)
    asyncio.run(reconciler._follow_changes())
    assert loop.woken.is_set()
    asyncio.run(loop._pass())
    assert traces.spans == [causes]


def test_the_request_that_wakes_is_linked() -> None:
    traces = _Noted()
    work: Any = _Work(True)
    loop = _loop(work, traces)
    reconciler = _reconciler(_Changes(), loop, traces)
    traces.here = "request"
    reconciler.wake(frozenset({"d"}), "org")
    asyncio.run(loop._pass())
    assert traces.spans == [("request",)]
