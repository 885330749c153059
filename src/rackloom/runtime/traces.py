"""Spans of a trace, as the parts of a site see them. `rackloom.app.tracing` sends them to a collector.

A part that works for a request is given a `Traces` and opens spans in it. `Traces` itself makes none, costs
a function call, and imports nothing of OpenTelemetry. A span belongs to the one that is open around it in
the same task.

A request and the pass that carries it out are two traces, because a pass serves many requests and a
request may need many passes. Links join them: `Traces.current` is the place of the open span as W3C's
`traceparent`, which may wait in a queue or travel to another process, and `span(..., causes)` opens a span
that is linked to such places.

Attributes are numbers, names and ids of the site's own records. Messages, addresses, tokens and the bodies
of requests are none: whoever reads traces need not be an operator.
"""

from collections.abc import Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext
from enum import StrEnum

Attribute = str | int | float | bool
MAX_CAUSES = 32
"""Links of one span: more requests than that wait for one pass only when a site is flooded."""


class SpanSide(StrEnum):
    """Which side of a call a span shows."""

    SERVER = "server"
    """It answers a request."""
    CLIENT = "client"
    """It waits for another system."""
    CONSUMER = "consumer"
    """It works on an item of a queue."""


class Span:
    """An open span. This one records nothing."""

    def note(self, attributes: Mapping[str, Attribute]) -> None:
        """Add attributes."""

    def rename(self, name: str) -> None:
        """Give the span another name, once its subject is known."""

    def fail(self, kind: str) -> None:
        """Mark the span as failed. `kind` is from a closed set of names."""


class Traces:
    """Makes no spans."""

    def span(
        self,
        _name: str,
        _side: SpanSide,
        *,
        causes: Iterable[str] | None = None,
        attributes: Mapping[str, Attribute] | None = None,
    ) -> AbstractContextManager[Span]:
        """Open a span until the context ends. An exception that leaves it fails the span.

        With `causes` (values of `current`) it begins a new trace that is linked to them.
        """
        return _NOTHING

    def current(self) -> str | None:
        """The place of the open span, or None if there is none or if it is not sent."""
        return None


_NOTHING: AbstractContextManager[Span] = nullcontext(Span())
NO_TRACES = Traces()
