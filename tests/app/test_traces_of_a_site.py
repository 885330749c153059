"""Spans of a site as a collector receives them: request, pass, driver call, observation, joined by links."""

import asyncio
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import httpx2
import pytest
from tests.app.collector import Collector, attributes, collecting
from tests.app.embedded_site import embedded_site
from tests.waiting import PATIENCE, until

from rackloom.app.home import Home
from rackloom.app.tracing import TraceSettings, open_traces
from rackloom.app.twin.site import EmbeddedSite
from rackloom.errors import Refused
from rackloom.runtime.traces import MAX_CAUSES, SpanSide

CALLER = "00-0123456789abcdef0123456789abcdef-0123456789abcdef-01"
CREATE = "POST /v2/org/{org}/nico/instance/batch"


async def carve(site: EmbeddedSite, token: str) -> None:
    """Two instances on a logical partition, until both are Ready."""
    headers = {"Authorization": f"Bearer {token}", "traceparent": CALLER}
    base = f"{site.url}/v2/org/demo/nico/"
    async with httpx2.AsyncClient(base_url=base, headers=headers, timeout=PATIENCE) as client:

        async def post(path: str, body: dict[str, Any]) -> Any:
            return (await client.post(path, json=body)).raise_for_status().json()

        where = (await client.get("site")).json()[0]["id"]
        kind = (await client.get(f"instance/type?siteId={where}")).json()[0]["id"]
        partition = (await post("nvlink-logical-partition", {"siteId": where, "name": "traced"}))["id"]
        vpc = await post("vpc", {"siteId": where, "name": "traced", "nvLinkLogicalPartitionId": partition})
        batch = {"vpcId": vpc["id"], "instanceTypeId": kind, "namePrefix": "traced", "count": 2}
        await post("instance/batch", batch)

        async def ready() -> bool:
            instances = (await client.get("instance")).json()
            return [instance["status"] for instance in instances] == ["Ready", "Ready"]

        await until(ready, "both instances are Ready")
        assert (await client.get("no-such-thing")).status_code == 404


def traced_site(folder: Path, ratio: float = 1.0) -> tuple[Collector, str]:
    """The collector of a site at work, and the token that was used there."""
    tokens = []

    async def scenario(url: str) -> None:
        settings = TraceSettings(endpoint=url, instance="one", sample_ratio=ratio)
        async with (
            open_traces(settings) as traces,
            embedded_site(Home(folder), port=0, racks=1, profile="gb200-nvl72", traces=traces) as site,
        ):
            tokens.append(site.issuer.mint("demo", ["TENANT_ADMIN"], time.time(), 600))
            await carve(site, tokens[0])

    with collecting() as collector:
        asyncio.run(scenario(collector.url))
    return collector, tokens[0]


def test_a_request_is_followed_through_pass_driver_call_and_observation(tmp_path: Path) -> None:
    for number in range(5):
        collector, token = traced_site(tmp_path / f"site-{number}")
        # A periodic pass may make the partition before the request wakes one.
        made = [span for span in collector.spans if span.name.startswith("execute create")]
        linked = {span.span_id for span in collector.named("reconcile") if span.links}
        if any(span.parent_span_id in linked for span in made):
            break
    (request,) = collector.named(CREATE)
    assert attributes(request) == {
        "http.request.method": "POST",
        "http.route": CREATE.removeprefix("POST "),
        "http.response.status_code": 201,
    }
    # The caller's own span is linked, and is not the parent.
    assert [link.trace_id.hex() for link in request.links] == ["0123456789abcdef0123456789abcdef"]
    assert request.trace_id.hex() != "0123456789abcdef0123456789abcdef"
    assert request.parent_span_id == b""
    here = (request.trace_id, request.span_id)
    passes = [
        span
        for span in collector.named("reconcile")
        if here in {(link.trace_id, link.span_id) for link in span.links}
    ]
    assert passes
    assert all(span.parent_span_id == b"" and span.trace_id != request.trace_id for span in passes)
    children = [
        span
        for span in collector.spans
        if (span.trace_id, span.parent_span_id) in {(parent.trace_id, parent.span_id) for parent in passes}
    ]
    names = [span.name for span in sorted(children, key=lambda span: span.start_time_unix_nano)]
    # The observation before, the driver's call, and the observation that confirms it.
    assert names[0] == names[-1] == "observe"
    create = next(span for span in children if span.name.startswith("execute create"))
    assert attributes(create)["rackloom.domain"] == attributes(children[0])["rackloom.domain"]
    confirmed = [span for span in children if span.name == "observe"][-1]
    assert confirmed.start_time_unix_nano >= create.end_time_unix_nano
    assert attributes(passes[-1])["rackloom.converged"] is True
    assert collector.resources[0]["service.name"] == "rackloom-site"
    # Libraries that could trace too do not: their spans would have paths and messages.
    assert {span.name.partition(" ")[0] for span in collector.spans} == {
        "GET",
        "POST",
        "reconcile",
        "observe",
        "execute",
    }
    assert_nothing_secret(collector, token)


def assert_nothing_secret(collector: Collector, token: str) -> None:
    """The sent spans contain no tokens, and no organisations, names or addresses of a request."""
    sent = b"".join(collector.bodies)
    assert sent
    for secret in (token, *token.split("."), "Bearer", "demo", "127.0.0.1", "namePrefix"):
        assert secret.encode() not in sent, secret


def test_a_pass_is_sent_when_the_request_that_it_serves_is(tmp_path: Path) -> None:
    """A chain is whole or not sent, at any share of traces."""
    collector, _ = traced_site(tmp_path / "site", ratio=0.5)
    sent = {(span.trace_id, span.span_id) for span in collector.spans}
    linked = {(link.trace_id, link.span_id) for span in collector.named("reconcile") for link in span.links}
    assert linked <= sent
    ids = {span.trace_id for span in collector.spans if span.parent_span_id}
    assert ids <= {span.trace_id for span in collector.spans if not span.parent_span_id}


def test_errors_are_named_and_not_quoted() -> None:
    async def scenario(url: str) -> None:
        async with open_traces(TraceSettings(endpoint=url, instance="one")) as traces:
            with pytest.raises(ValueError, match="secret"), traces.span("work", SpanSide.CLIENT):
                raise ValueError("secret")
            assert traces.current() is None

    with collecting() as collector:
        asyncio.run(scenario(collector.url))
    (span,) = collector.spans
    assert attributes(span) == {"error.type": "ValueError"}
    assert (span.status.code, span.status.message) == (2, "ValueError")
    assert not span.events
    assert b"secret" not in collector.bodies[0]


@pytest.mark.parametrize(
    "cause",
    [
        "",
        "no",
        "00-" + "0" * 32 + "-" + "0" * 16 + "-01",
        "00-" + "g" * 32 + "-" + "1" * 16 + "-01",
        CALLER * 9,
    ],
)
def test_what_is_no_place_of_a_span_is_no_link(cause: str) -> None:
    async def scenario(url: str) -> None:
        async with open_traces(TraceSettings(endpoint=url, instance="one")) as traces:
            with traces.span("work", SpanSide.SERVER, causes=[cause]):
                pass

    with collecting() as collector:
        asyncio.run(scenario(collector.url))
    assert [list(span.links) for span in collector.spans] == [[]]


def test_links_of_a_span_are_bounded() -> None:
    places = [f"00-{1:032x}-{number:016x}-01" for number in range(1, 2 * MAX_CAUSES)]

    async def scenario(url: str) -> None:
        async with open_traces(TraceSettings(endpoint=url, instance="one")) as traces:
            with traces.span("work", SpanSide.CONSUMER, causes=places):
                pass

    with collecting() as collector:
        asyncio.run(scenario(collector.url))
    assert len(collector.spans[0].links) == MAX_CAUSES


@pytest.mark.slow
def test_a_site_works_while_its_collector_is_away(tmp_path: Path) -> None:
    async def scenario() -> None:
        settings = TraceSettings(endpoint="http://127.0.0.1:9", instance="one")
        async with (
            open_traces(settings) as traces,
            embedded_site(Home(tmp_path), port=0, racks=1, profile="gb200-nvl72", traces=traces) as site,
        ):
            await carve(site, site.issuer.mint("demo", ["TENANT_ADMIN"], time.time(), 600))

    began = time.monotonic()
    asyncio.run(scenario())
    assert time.monotonic() - began < PATIENCE


@pytest.mark.parametrize(
    "url", ["collector:4318", "http://user:hunter2@collector", "http://c/?key=1", "ftp://c"]
)
def test_another_url_than_that_of_a_collector_is_refused(url: str) -> None:
    async def scenario() -> None:
        async with open_traces(TraceSettings(endpoint=url, instance="one")):
            pass

    with pytest.raises(Refused) as refused:
        asyncio.run(scenario())
    assert "hunter2" not in str(refused.value)


@pytest.mark.slow
def test_nothing_of_the_sdk_is_imported_while_traces_are_off() -> None:
    program = (
        "import sys, rackloom.app.site.service, rackloom.app.twin.up\n"
        "parts = ('opentelemetry.sdk', 'opentelemetry.exporter')\n"
        "print([name for name in sys.modules if name.startswith(parts)])"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=PATIENCE
    )
    assert done.stdout == "[]\n"
