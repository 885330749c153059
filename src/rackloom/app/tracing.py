"""Sends spans to an OpenTelemetry collector by OTLP over HTTP. Needs the extra `rackloom[otel]`.

`open_traces` builds the SDK's own parts: a batch of spans waits in memory and is sent by a thread, so that
no request and no pass waits for a collector. While that cannot be reached, spans are dropped and the site
goes on.
The provider is not made the global one of the process: libraries that trace whenever a global provider
is set would add messages and paths that this module leaves out.

Sampling decides at the beginning of a trace, by its id. A pass that works for a request is sent whenever
that request is, regardless of its own id: half of a chain explains nothing. A caller's `traceparent` becomes
a link and never the parent, because callers are not trusted to decide which spans a site records.
"""

import re
from collections.abc import AsyncIterator, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, asynccontextmanager, contextmanager
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Final
from urllib.parse import urlsplit

import msgspec

from rackloom.errors import Refused
from rackloom.runtime.traces import MAX_CAUSES, NO_TRACES, Attribute, Span, SpanSide, Traces

if TYPE_CHECKING:
    from opentelemetry import trace
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.sampling import Sampler

SERVICE: Final = "rackloom-site"
PATH: Final = "/v1/traces"
EXPORT_SECONDS: Final = 5.0
"""The longest time of one export, and of the last one at the end of the process."""
_TRACEPARENT = re.compile(r"00-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})")
_SAMPLED: Final = 0x01


class TraceSettings(msgspec.Struct, frozen=True, kw_only=True):
    """`endpoint` is the URL of the collector of spans without its path, `instance` this process."""

    endpoint: str
    instance: str
    sample_ratio: float = 1.0
    """Share of traces that are sent, from 0 to 1."""
    ca_file: Path | None = None


def collector_url_problem(url: str) -> str | None:
    """The fault of a collector's URL, or None if it is usable."""
    parts = urlsplit(url)
    if parts.username or parts.password:
        return "a URL with a password would be shown: use OTEL_EXPORTER_OTLP_HEADERS"
    if parts.scheme not in ("http", "https") or not parts.hostname or parts.query or parts.fragment:
        return f"{url} is no URL of a collector: write it like http://127.0.0.1:4318"
    return None


@asynccontextmanager
async def open_traces(settings: TraceSettings | None) -> AsyncIterator[Traces]:
    """Spans that are sent as `settings` define, or none without them. Waiting spans are sent at the end.

    Raises Refused for another URL than that of a collector, and if the extra is not installed.
    """
    if settings is None:
        yield NO_TRACES
        return
    if (problem := collector_url_problem(settings.endpoint)) is not None:
        raise Refused(problem, nearest_fix=None)
    import asyncio

    provider = _provider(settings)
    try:
        yield SentTraces(provider)
    finally:
        await asyncio.to_thread(provider.shutdown)


def _provider(settings: TraceSettings) -> "TracerProvider":
    try:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
    except ImportError as error:
        raise Refused(
            f"traces need OpenTelemetry, which is not installed ({error.name})",
            nearest_fix="pip install 'rackloom[otel]', or leave out [tracing]",
        ) from error
    resource = Resource.create(
        {
            "service.name": SERVICE,
            "service.version": version("rackloom"),
            "service.instance.id": settings.instance,
        }
    )
    exporter = OTLPSpanExporter(
        endpoint=settings.endpoint.rstrip("/") + PATH,
        certificate_file=None if settings.ca_file is None else str(settings.ca_file),
        timeout=EXPORT_SECONDS,
    )
    provider = TracerProvider(sampler=_sampler(settings.sample_ratio), resource=resource)
    provider.add_span_processor(BatchSpanProcessor(exporter))
    return provider


class SentTraces(Traces):
    """Spans of an OpenTelemetry provider."""

    def __init__(self, provider: "TracerProvider") -> None:
        self._tracer = provider.get_tracer("rackloom", version("rackloom"))

    def span(
        self,
        name: str,
        side: SpanSide,
        *,
        causes: Iterable[str] | None = None,
        attributes: Mapping[str, Attribute] | None = None,
    ) -> AbstractContextManager[Span]:
        """Open a span until the context ends."""
        return self._open(name, side, causes, attributes)

    @contextmanager
    def _open(
        self,
        name: str,
        side: SpanSide,
        causes: Iterable[str] | None,
        attributes: Mapping[str, Attribute] | None,
    ) -> Iterator[Span]:
        from opentelemetry import trace
        from opentelemetry.context import Context

        opened = self._tracer.start_as_current_span(
            name,
            # An empty context: a separate trace.
            context=None if causes is None else Context(),
            kind=trace.SpanKind[side.name],
            attributes=dict(attributes or {}),
            links=[trace.Link(place) for place in _places(causes or ())],
            # The message of an exception may hold addresses.
            record_exception=False,
            set_status_on_exception=False,
        )
        with opened as inner:
            span = _SentSpan(inner)
            try:
                yield span
            except BaseException as error:
                span.fail(type(error).__name__)
                raise

    def current(self) -> str | None:
        """The place of the open span."""
        from opentelemetry import trace

        place = trace.get_current_span().get_span_context()
        if not (place.is_valid and place.trace_flags.sampled):
            return None
        return f"00-{place.trace_id:032x}-{place.span_id:016x}-{place.trace_flags:02x}"


class _SentSpan(Span):
    def __init__(self, span: "trace.Span") -> None:
        self._span = span

    def note(self, attributes: Mapping[str, Attribute]) -> None:
        self._span.set_attributes(attributes)

    def rename(self, name: str) -> None:
        self._span.update_name(name)

    def fail(self, kind: str) -> None:
        from opentelemetry.trace import Status, StatusCode

        self._span.set_status(Status(StatusCode.ERROR, kind))
        self._span.set_attribute("error.type", kind)


def _places(causes: Iterable[str]) -> "Iterator[trace.SpanContext]":
    """The spans that `causes` name. An invalid `traceparent` is left out."""
    from opentelemetry import trace

    for _, cause in zip(range(MAX_CAUSES), causes, strict=False):
        if (match := _TRACEPARENT.fullmatch(cause)) is not None:
            trace_id, span_id, flags = (int(part, 16) for part in match.groups())
            place = trace.SpanContext(trace_id, span_id, True, trace.TraceFlags(flags & _SAMPLED))
            if place.is_valid:
                yield place


def _sampler(ratio: float) -> "Sampler":
    """Sends a share of the traces, and each that is linked to one of our own that is sent."""
    from opentelemetry.sdk.trace import sampling

    by_id = sampling.TraceIdRatioBased(ratio)

    class LinkedSampler(sampling.Sampler):
        def should_sample(  # type: ignore[no-untyped-def]
            self, parent_context, trace_id, name, kind=None, attributes=None, links=None, trace_state=None
        ) -> sampling.SamplingResult:
            followed = kind is not None and kind.name == SpanSide.CONSUMER.name
            if followed and any(link.context.trace_flags.sampled for link in links or ()):
                return sampling.SamplingResult(sampling.Decision.RECORD_AND_SAMPLE, attributes)
            return by_id.should_sample(parent_context, trace_id, name, kind, attributes, links, trace_state)

        def get_description(self) -> str:
            return f"LinkedSampler({ratio})"

    return sampling.ParentBased(root=LinkedSampler())
