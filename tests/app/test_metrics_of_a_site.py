"""Metrics for Prometheus: upstream's names, zeros from the start, and numbers that follow the events."""

import asyncio

import httpx2
import pytest
from prometheus_client.parser import text_string_to_metric_families
from tests.waiting import PATIENCE, until

from rackloom.app.config import load_config
from rackloom.app.site.metrics import OPERATIONS, MetricsEndpoints, SiteMetrics, connect_error
from rackloom.app.site.record_counts import DomainCounts, SiteCounts, node_health
from rackloom.app.site.service import site_service
from rackloom.carve.api.limits import CallerClass
from rackloom.carve.fabric.controller import ControllerKind
from rackloom.carve.inventory import endpoints
from rackloom.carve.reconcile.domain_pass import OperationOutcome
from rackloom.carve.store.database import Store
from rackloom.carve.store.journal import OperatorOrder
from rackloom.core.diagnosis.catalogue import Check
from rackloom.core.diagnosis.findings import Severity, fails
from rackloom.core.partitions.domain import (
    DEFAULT_PARTITION_ID,
    AddGpus,
    CreatePartition,
    DeletePartition,
    GpuHealth,
    RemoveGpus,
)
from rackloom.web.model import SiteMap

NOTHING = SiteCounts(
    logical_partitions=0,
    physical_partitions=0,
    endpoints={"known": 0, "unknown": 0, "never": 0},
    domains=(),
    ready_seconds=(),
    newest_history=0,
)
UPSTREAM = {
    "iteration_latency_milliseconds": "histogram",
    "nmxc_op_latency_milliseconds": "histogram",
    "nmxm_op_latency_milliseconds": "histogram",
    "nvlink_config_apply_latency_milliseconds": "histogram",
    "nmxc_changes_applied": "counter",
    "nmxm_changes_applied": "counter",
    "machine_status_updates_count": "gauge",
    "num_logical_partitions": "gauge",
    "num_physical_partitions": "gauge",
    "nmxc_connect_error_count": "gauge",
    "nmxm_connect_error_count": "gauge",
    "nmxc_partition_count": "gauge",
    "nmxc_gpu_count": "gauge",
    "nmxc_compute_node_count": "gauge",
}


def samples(page):
    """Name and labels -> value."""
    return {
        (sample.name, *sorted(sample.labels.items())): sample.value
        for family in text_string_to_metric_families(page)
        for sample in family.samples
    }


def test_the_page_and_readyz_show_the_findings_of_one_examination():
    finding = fails(Check.CONTROLLER, "domain d", "it is silent", "rackloom admin domain show d")

    async def scenario():
        store = Store.inline()
        page = MetricsEndpoints(SiteMetrics("nico_"), store, lambda: 90.0, 60.0)
        async with httpx2.AsyncClient(transport=httpx2.ASGITransport(page), base_url="http://site") as http:
            unexamined = samples((await http.get("/metrics")).text)
            page.site = lambda: SiteMap(at=80.0, findings=(finding,), examined_at=79.0)
            examined = samples((await http.get("/metrics")).text)
            ready = (await http.get("/readyz")).text
        await store.close()
        return unexamined, examined, ready

    unexamined, examined, ready = asyncio.run(scenario())
    assert not any(name.startswith("rackloom_doctor") for name, *_ in unexamined)
    assert examined["rackloom_doctor_ok",] == 0
    assert examined["rackloom_doctor_examined_seconds",] == 79
    labels = ("check", Check.CONTROLLER), ("severity", Severity.ERROR)
    assert examined["rackloom_doctor_findings", *labels] == 1
    assert "domain d: error: it is silent" in ready


@pytest.mark.parametrize("prefix", ["nico_", "carbide_", ""])
def test_upstreams_names(prefix):
    page = SiteMetrics(prefix).page(NOTHING, 0.0).decode()
    kinds = {family.name: family.type for family in text_string_to_metric_families(page)}
    for name, kind in UPSTREAM.items():
        assert kinds[f"{prefix}nvlink_partition_monitor_{name}"] == kind, name


def test_zeros_are_there_before_anything_happened():
    seen = samples(SiteMetrics("nico_").page(NOTHING, 0.0).decode())
    base = "nico_nvlink_partition_monitor_"
    for controllers in ("nmxc", "nmxm"):
        assert seen[f"{base}{controllers}_connect_error_count", ("error", "UNAVAILABLE")] == 0
        for operation in OPERATIONS:
            for status in ("completed", "failed", "timedout"):
                labels = ("operation", operation), ("status", status)
                assert seen[f"{base}{controllers}_changes_applied_total", *labels] == 0
    assert seen["nico_nvlink_refused_plans_total",] == 0
    assert seen["nico_nvlink_instance_ready_seconds_count",] == 0


@pytest.mark.parametrize(
    ("reason", "label"),
    [
        ("Hello: UNAVAILABLE: failed to connect to all addresses", "UNAVAILABLE"),
        ("Hello: DEADLINE_EXCEEDED: Deadline Exceeded", "DEADLINE_EXCEEDED"),
        ("Hello: domain uuid '' names no domain", "bad-hello"),
        ("cannot read /etc/key: No such file or directory", "client"),
        ("http://x is plaintext, which this site does not allow", "client"),
        ("GetGpuInfoList: UNAVAILABLE: gone", None),
        ("Hello: " + "A" * 50 + ": x", "A" * 32),
    ],
)
def test_a_connect_error_is_one_that_did_not_get_beyond_hello(reason, label):
    assert connect_error(reason) == label


@pytest.mark.parametrize(
    ("operation", "name"),
    [
        (CreatePartition(name="p", logical_partition="l", guids=(1,)), "create"),
        (AddGpus(partition_id=1, name="p", guids=(1,)), "update"),
        (RemoveGpus(partition_id=1, name="p", guids=(1,)), "remove"),
        (DeletePartition(partition_id=1, name="p"), "remove"),
        (DeletePartition(partition_id=DEFAULT_PARTITION_ID, name="d"), "remove_default_partition"),
        (RemoveGpus(partition_id=DEFAULT_PARTITION_ID, name="d", guids=(1,)), "remove_default_partition"),
    ],
)
@pytest.mark.parametrize(
    ("state", "status"), [("done", "completed"), ("refused", "failed"), ("unknown", "timedout")]
)
def test_operations_have_upstreams_words(operation, name, state, status):
    metrics = SiteMetrics("")
    metrics.operated(
        "e1", operation, OperationOutcome(kind="", partition_name="p", state=state, message=""), 0.25
    )
    seen = samples(metrics.page(NOTHING, 0.0).decode())
    labels = ("operation", name), ("status", status)
    assert seen["nvlink_partition_monitor_nmxc_changes_applied_total", *labels] == 1
    assert seen["nvlink_partition_monitor_nmxc_op_latency_milliseconds_sum", *labels] == 250


def test_refused_requests_are_counted_by_the_class_of_their_caller():
    metrics = SiteMetrics("")
    metrics.refused_request(CallerClass.TENANT)
    seen = samples(metrics.page(NOTHING, 0.0).decode())
    assert seen["nvlink_refused_requests_total", ("caller", "tenant")] == 1
    assert seen["nvlink_refused_requests_total", ("caller", "provider")] == 0


def test_a_domain_that_is_gone_leaves_no_numbers():
    metrics = SiteMetrics("")
    domain = DomainCounts(
        uuid="d",
        kind=ControllerKind.NMX_C,
        observed_at=40.0,
        partitions={"healthy": 2},
        gpus={"degraded": 1},
        nodes={"degraded": 1},
        multicast_groups={"limit": 1024, "used": 0},
    )
    counts = {name: getattr(NOTHING, name) for name in NOTHING.__struct_fields__}
    page = metrics.page(SiteCounts(**(counts | {"domains": (domain,)})), 100.0).decode()
    assert samples(page)["nvlink_observation_age_seconds", ("nvlink_domain_uuid", "d")] == 60
    labels = ("health", "degraded"), ("nvlink_domain_uuid", "d")
    assert samples(page)["nvlink_partition_monitor_nmxc_gpu_count", *labels] == 1
    assert samples(page)["nvlink_partition_monitor_nmxc_compute_node_count", *labels] == 1
    for state, number in (("limit", 1024), ("used", 0)):
        labels = ("nvlink_domain_uuid", "d"), ("state", state)
        assert samples(page)["nvlink_multicast_groups", *labels] == number
    assert 'nvlink_domain_uuid="d"' not in metrics.page(NOTHING, 100.0).decode()


@pytest.mark.parametrize(
    ("healths", "node"),
    [
        ((1, 1, 1, 1), "healthy"),
        ((1, 1, 1, 2), "degraded"),
        ((1, 3, 3, 3), "degraded"),
        ((4, 4, 4, 4), "degraded"),
        ((3, 3, 3, 3), "unhealthy"),
        ((0, 0), "unknown"),
    ],
)
def test_a_compute_node_has_the_health_of_its_gpus(healths, node):
    assert node_health({GpuHealth(health) for health in healths}) == node


async def scrape(site):
    async with httpx2.AsyncClient(timeout=PATIENCE) as client:
        return samples((await client.get(f"http://127.0.0.1:{site.metrics_port}/metrics")).text)


async def scraped(site, holds):
    """The site's metrics, once `holds` is true of them."""

    async def look():
        seen = await scrape(site)
        return seen if holds(seen) else None

    return await until(look, "the metrics follow")


@pytest.mark.slow
def test_a_site_that_drifts_and_loses_its_switch(ground):
    base = "nico_nvlink_partition_monitor_"

    async def scenario():
        async with ground.racks() as (switch,), site_service(load_config(ground.config())) as site:
            at_first = switch.fabric.snapshot()
            domain = ("nvlink_domain_uuid", switch.fabric.domain)
            order = OperatorOrder("test", "", site.reconciler.clock())
            serial = next(iter(switch.fabric.gpus.values())).chassis_serial
            await site.store.run(endpoints.create_chassis_endpoint, serial, switch.url, order, lambda: "e1")
            site.reconciler.endpoints_changed()
            gone = (
                f"{base}nmxc_changes_applied_total",
                ("operation", "remove_default_partition"),
                ("status", "completed"),
            )
            seen = await scraped(site, lambda seen: seen[gone] == 1)
            assert seen["nico_nvlink_drift_operations_total", domain] == 0
            assert seen[f"{base}machine_status_updates_count",] == 18
            assert seen["nico_nvlink_endpoints", ("state", "known")] == 1
            await scraped(site, lambda seen: seen[f"{base}iteration_latency_milliseconds_count",] >= 1)
            switch.fabric.restore(at_first)
            site.reconciler.wake(frozenset({switch.fabric.domain}))
            seen = await scraped(site, lambda seen: seen[gone] == 2)
            assert seen["nico_nvlink_drift_operations_total", domain] == 1
            await switch.go_away()
            site.reconciler.wake(frozenset({switch.fabric.domain}))
            lost = (f"{base}nmxc_connect_error_count", ("error", "UNAVAILABLE"))
            seen = await scraped(site, lambda seen: seen[lost] >= 2)
            assert seen["nico_nvlink_endpoints", ("state", "unknown")] == 1
            assert seen["nico_nvlink_observation_age_seconds", domain] > 0

    asyncio.run(scenario())


def test_pages_that_are_not_there(ground):
    async def scenario():
        async with (
            site_service(load_config(ground.config())) as site,
            httpx2.AsyncClient(timeout=PATIENCE) as client,
        ):
            assert (await client.get(f"http://127.0.0.1:{site.metrics_port}/admin")).status_code == 404

    asyncio.run(scenario())


def test_what_an_nmxm_does_is_counted_as_its_own():
    metrics = SiteMetrics("")
    metrics.set_kind("m", ControllerKind.NMX_M)
    done = OperationOutcome(kind="", partition_name="p", state="done", message="")
    metrics.operated("m", DeletePartition(partition_id=1, name="p"), done, 0.25)
    metrics.unreachable("m", "Hello: UNAVAILABLE: connection refused")
    labels = {"operation": "remove", "status": "completed"}
    for family, times in (("nmxm", 1.0), ("nmxc", 0.0)):
        base = f"nvlink_partition_monitor_{family}"
        sample = metrics.registry.get_sample_value
        assert sample(f"{base}_changes_applied_total", labels) == times
        assert sample(f"{base}_op_latency_milliseconds_count", labels) == times
        assert sample(f"{base}_connect_error_count", {"error": "UNAVAILABLE"}) == times
