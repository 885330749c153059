"""Writes the Grafana dashboards of dashboards/: `python deploy/monitoring/write_dashboards.py`.

A dashboard is a list of panels, each with a question that it answers and its queries. The writer adds what
Grafana needs besides: ids, positions in rows of three, the variable for the data source. So the four files
look alike, and a renamed metric is a change of one line here. Queries of a site are written for the
default prefix `nico_`. `tests/deploy/test_dashboards.py` compares the files with this program, and
`tests/app/test_dashboards_have_data.py` asks a real Prometheus every query.
"""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parent / "dashboards"
WIDTH, HEIGHT, COLUMNS = 8, 8, 24
"""Of a panel, and of the whole grid, in Grafana's units."""
SCHEMA_VERSION = 39
"""Of Grafana 10 and later, which migrate older ones themselves."""
RATE = "[$__rate_interval]"
MONITOR, OURS = "nico_nvlink_partition_monitor_", "nico_nvlink_"


@dataclass(frozen=True)
class Panel:
    """One graph. `queries` are pairs of an expression and the legend of its series."""

    title: str
    about: str
    unit: str
    queries: tuple[tuple[str, str], ...]
    kind: str = "timeseries"


@dataclass(frozen=True)
class Dashboard:
    """One file. `name` is also the end of its uid."""

    name: str
    title: str
    panels: tuple[Panel, ...]


def _quantiles(series: str, legend: str = "") -> tuple[tuple[str, str], ...]:
    """Median and 99th percentile of a histogram."""
    return tuple(
        (f"histogram_quantile({share}, sum by (le) (rate({series}_bucket{RATE})))", f"{legend}{name}")
        for share, name in ((0.5, "p50"), (0.99, "p99"))
    )


def _of_both(form: str) -> str:
    """`form` for NMX-C plus the same for NMX-M; both families exist whichever the site has."""
    return " + ".join(form.format(f"{MONITOR}{kind}") for kind in ("nmxc", "nmxm"))


def _by_health(name: str) -> tuple[tuple[str, str], ...]:
    either = f"{MONITOR}nmxc_{name}_count or {MONITOR}nmxm_{name}_count"
    return ((f"sum by (health) (max by (nvlink_domain_uuid, health) ({either}))", "{{health}}"),)


SITE = Dashboard(
    "site",
    "Rackloom site",
    (
        Panel(
            "Replicas",
            "How many replicas of the site service can be scraped; racks keep their partitions without any.",
            "short",
            (('sum(up{job="rackloom-site"})', "up"), ('count(up{job="rackloom-site"})', "known")),
        ),
        Panel(
            "Age of the newest observation",
            "A domain is unknown when its newest reading is too old.",
            "s",
            ((f"max by (nvlink_domain_uuid) ({OURS}observation_age_seconds)", "{{nvlink_domain_uuid}}"),),
        ),
        Panel(
            "Switch controllers",
            "By what is known of them; `never` has not answered since it was registered.",
            "short",
            ((f"max by (state) ({OURS}endpoints)", "{{state}}"),),
        ),
        Panel(
            "Failed hellos",
            "Attempts to reach a switch controller that did not get beyond the first call.",
            "short",
            ((_of_both("sum by (error) (increase({}_connect_error_count" + RATE + "))"), "{{error}}"),),
        ),
        Panel(
            "Disputed domains",
            "Domains whose switch controllers contradict one another; nothing is changed there.",
            "short",
            ((f"max({OURS}disputed_domains)", "disputed"),),
        ),
        Panel(
            "Free multicast groups",
            "Partitions get theirs when they are made, and a new one gets none when they have run out.",
            "short",
            (
                (
                    f'max by (nvlink_domain_uuid) ({OURS}multicast_groups{{state="limit"}})'
                    f' - max by (nvlink_domain_uuid) ({OURS}multicast_groups{{state="used"}})',
                    "{{nvlink_domain_uuid}}",
                ),
            ),
        ),
        Panel(
            "API call to Ready",
            "From the call that changed what an instance wants to the observation that it has it.",
            "s",
            _quantiles(f"{OURS}instance_ready_seconds"),
        ),
        Panel(
            "Time of a pass",
            "One pass over a domain: observe, plan, execute, observe.",
            "ms",
            _quantiles(f"{MONITOR}iteration_latency_milliseconds"),
        ),
        Panel(
            "Time of an operation",
            "One call that changes a partition, at the switch controller.",
            "ms",
            (
                (
                    "histogram_quantile(0.99, "
                    + _of_both("sum by (le, operation) (rate({}_op_latency_milliseconds_bucket" + RATE + "))")
                    + ")",
                    "{{operation}} p99",
                ),
            ),
        ),
        Panel(
            "Time to carry out a plan",
            "All operations of one plan.",
            "ms",
            _quantiles(f"{MONITOR}nvlink_config_apply_latency_milliseconds"),
        ),
        Panel(
            "Operations by outcome",
            "`failed`: the controller refused. `timedout`: unknown until the next observation.",
            "short",
            (
                (
                    _of_both("sum by (operation, status) (increase({}_changes_applied_total" + RATE + "))"),
                    "{{operation}} {{status}}",
                ),
            ),
        ),
        Panel(
            "Drift and refused plans",
            "Operations that undid what another client of the switch did; plans that no longer held.",
            "short",
            (
                (
                    f"sum by (nvlink_domain_uuid) (increase({OURS}drift_operations_total{RATE}))",
                    "drift {{nvlink_domain_uuid}}",
                ),
                (f"sum(increase({OURS}refused_plans_total{RATE}))", "refused plans"),
            ),
        ),
        Panel(
            "Partitions",
            "What tenants want, and what the site has made.",
            "short",
            (
                (f"max({MONITOR}num_logical_partitions)", "logical"),
                (f"max({MONITOR}num_physical_partitions)", "physical"),
            ),
        ),
        Panel("Partitions by health", "As observed.", "short", _by_health("partition")),
        Panel("GPUs by health", "As observed.", "short", _by_health("gpu")),
        Panel("Compute nodes by health", "By their GPUs.", "short", _by_health("compute_node")),
        Panel(
            "Requests answered with 429",
            "By the class of the caller: limits of one organisation do not touch the others.",
            "short",
            ((f"sum by (caller) (increase({OURS}refused_requests_total{RATE}))", "{{caller}}"),),
        ),
        Panel(
            "Requests without a valid token",
            "By what was wrong with the token.",
            "short",
            ((f"sum by (why) (increase({OURS}unauthenticated_requests_total{RATE}))", "{{why}}"),),
        ),
        Panel(
            "Connections that a limit ended",
            "By listener and limit.",
            "short",
            (
                (
                    f"sum by (listener, why) (increase({OURS}connections_ended_total{RATE}))",
                    "{{listener}} {{why}}",
                ),
            ),
        ),
    ),
)
_PLUGINS = 'up{job=~"rackloom-node-.+"}'
CLAIMS = Dashboard(
    "claims",
    "Rackloom claims",
    (
        Panel(
            "ComputeDomains",
            "By their status, as the leader counts them.",
            "short",
            (("max by (status) (nvidia_dra_compute_domain_info)", "{{status}}"),),
        ),
        Panel(
            "Controllers",
            "Exactly one replica leads.",
            "short",
            (
                ("sum(rackloom_controller_leading)", "leading"),
                ('sum(up{job="rackloom-controller"})', "up"),
            ),
        ),
        Panel(
            "Node plugins",
            "Plugins that can be scraped; without its plugin a node prepares no new claims.",
            "short",
            ((f"sum by (job) ({_PLUGINS})", "{{job}} up"), (f"count by (job) ({_PLUGINS})", "{{job}}")),
        ),
        Panel(
            "Claims prepared and given back",
            "Requests of kubelet of which every claim succeeded.",
            "short",
            (
                (
                    f"sum by (driver, operation) (increase(nvidia_dra_requests_total{RATE}))",
                    "{{driver}} {{operation}}",
                ),
            ),
        ),
        Panel(
            "Time to answer kubelet",
            "99th percentile, with all retries within the request.",
            "s",
            (
                (
                    "histogram_quantile(0.99, sum by (le, driver, operation)"
                    f" (rate(nvidia_dra_request_duration_seconds_bucket{RATE})))",
                    "{{driver}} {{operation}}",
                ),
            ),
        ),
        Panel(
            "Claims that failed",
            "By driver and kind of error; the event of the pod names the fix.",
            "short",
            (
                (
                    f"sum by (driver, error_type) (increase(nvidia_dra_node_prepare_errors_total{RATE}))",
                    "{{driver}} {{error_type}}",
                ),
                (
                    f"sum by (driver, error_type) (increase(nvidia_dra_node_unprepare_errors_total{RATE}))",
                    "{{driver}} {{error_type}}",
                ),
            ),
        ),
        Panel(
            "Devices of prepared claims",
            "By type.",
            "short",
            (
                (
                    "sum by (driver, device_type) (nvidia_dra_prepared_devices)",
                    "{{driver}} {{device_type}}",
                ),
            ),
        ),
        Panel(
            "Requests being answered",
            "A number that stays is a plugin that waits for a device.",
            "short",
            (("sum by (driver, operation) (nvidia_dra_requests_inflight)", "{{driver}} {{operation}}"),),
        ),
        Panel(
            "Container runtime",
            "Nodes whose NIC plugin the container runtime calls; pods with NICs start on no other.",
            "short",
            (
                ("sum(rackloom_nri_connected)", "connected"),
                ("count(rackloom_nri_connected)", "with a NIC plugin"),
            ),
        ),
        Panel(
            "NICs in pods",
            "Also those on their way there or back.",
            "short",
            (("sum(rackloom_nics_lent)", "NICs"),),
        ),
        Panel(
            "DHCP leases of NICs",
            "By state.",
            "short",
            (("sum by (state) (rackloom_nic_dhcp_leases)", "{{state}}"),),
        ),
        Panel(
            "Questions of the API server",
            "Reviews that the webhook answered.",
            "short",
            (
                (
                    f"sum by (page, answer) (increase(rackloom_admission_requests_total{RATE}))",
                    "{{page}} {{answer}}",
                ),
            ),
        ),
        Panel(
            "Time of an answer of the webhook",
            "The API server waits for five seconds.",
            "s",
            _quantiles("rackloom_admission_seconds"),
        ),
        Panel(
            "Serving certificate of the webhook",
            "Time that it is still valid; it renews itself.",
            "s",
            (("min(rackloom_webhook_certificate_expiry_timestamp_seconds) - time()", "valid for"),),
        ),
    ),
)
GANGS = Dashboard(
    "gangs",
    "Rackloom gangs",
    (
        Panel(
            "Gangs",
            "By the reason of their condition Placed.",
            "short",
            (("max by (reason) (rackloom_gangs)", "{{reason}}"),),
        ),
        Panel(
            "Gangs placed",
            "Trays were reserved for all members.",
            "short",
            ((f"sum(increase(rackloom_gang_placements_total{RATE}))", "placed"),),
        ),
        Panel(
            "First pod to all pods let go",
            "What a gang waits before any of its pods may start.",
            "s",
            _quantiles("rackloom_gang_ungate_seconds"),
        ),
        Panel(
            "Warnings about gangs",
            "By reason; the event of the GangPlan names the fix.",
            "short",
            ((f"sum by (reason) (increase(rackloom_gang_refusals_total{RATE}))", "{{reason}}"),),
        ),
        Panel(
            "Members replaced",
            "Pods that were deleted for their owner to make them anew, after a tray was lost.",
            "short",
            ((f"sum(increase(rackloom_gang_members_replaced_total{RATE}))", "replaced"),),
        ),
        Panel(
            "Controllers",
            "Gangs are placed by the replica that leads.",
            "short",
            (("sum(rackloom_controller_leading)", "leading"),),
        ),
    ),
)
_ARM = "{{instance}} {{arm}} {{device}}"
TRANSFERS = Dashboard(
    "transfers",
    "Rackloom transfers",
    (
        Panel(
            "Rate",
            "Mean of the runs of the last measurement on each node.",
            "Bps",
            (
                (
                    "max by (instance, arm, gpu, device, together) (rackloom_transfer_rate_bytes_per_second)",
                    _ARM,
                ),
            ),
        ),
        Panel(
            "Time of a request",
            "Of the runs the slowest 99th percentile.",
            "s",
            (
                (
                    "max by (instance, arm, gpu, device, together)"
                    ' (rackloom_transfer_request_seconds{quantile="0.99"})',
                    f"{_ARM} p99",
                ),
            ),
        ),
        Panel(
            "Measurements that proved the path",
            "All data was verified, and the promised device carried it.",
            "short",
            (("sum(rackloom_transfer_proved)", "proved"), ("count(rackloom_transfer_proved)", "measured")),
        ),
        Panel(
            "Data that arrived unchanged",
            "Pairs of ends.",
            "short",
            (
                ("sum(rackloom_transfer_verified)", "verified"),
                ("count(rackloom_transfer_verified)", "measured"),
            ),
        ),
        Panel(
            "Slower than promised",
            "Pairs that did not reach the share of the line rate that their path promises.",
            "short",
            (("sum by (instance) (rackloom_transfer_short)", "{{instance}}"),),
        ),
        Panel(
            "Age of the newest measurement",
            "A timer that stopped looks like a path that is well.",
            "s",
            (("time() - max by (instance) (rackloom_transfer_measured_seconds)", "{{instance}}"),),
        ),
        Panel(
            "Emulated measurements",
            "Shaped links stood for the devices: their rates say nothing about this hardware.",
            "short",
            (("sum(rackloom_transfer_emulated)", "emulated"),),
        ),
    ),
)
DASHBOARDS = (SITE, CLAIMS, GANGS, TRANSFERS)
_SOURCE = {"type": "prometheus", "uid": "${datasource}"}


def content(dashboard: Dashboard) -> str:
    """The file of a dashboard."""
    return json.dumps(_model(dashboard), indent=2) + "\n"


def _model(dashboard: Dashboard) -> dict[str, Any]:
    return {
        "title": dashboard.title,
        "uid": f"rackloom-{dashboard.name}",
        "schemaVersion": SCHEMA_VERSION,
        "version": 1,
        "editable": True,
        "refresh": "30s",
        "time": {"from": "now-6h", "to": "now"},
        "tags": ["rackloom"],
        "templating": {
            "list": [
                {"name": "datasource", "type": "datasource", "query": "prometheus", "label": "Data source"}
            ]
        },
        "panels": [_panel(number, panel) for number, panel in enumerate(dashboard.panels)],
    }


def _panel(number: int, panel: Panel) -> dict[str, Any]:
    per_row = COLUMNS // WIDTH
    return {
        "id": number + 1,
        "title": panel.title,
        "description": panel.about,
        "type": panel.kind,
        "datasource": _SOURCE,
        "fieldConfig": {"defaults": {"unit": panel.unit, "min": 0}, "overrides": []},
        "gridPos": {
            "x": number % per_row * WIDTH,
            "y": number // per_row * HEIGHT,
            "w": WIDTH,
            "h": HEIGHT,
        },
        "options": {"legend": {"displayMode": "list", "placement": "bottom", "showLegend": True}},
        "targets": [
            {"refId": chr(ord("A") + place), "datasource": _SOURCE, "expr": query, "legendFormat": legend}
            for place, (query, legend) in enumerate(panel.queries)
        ],
    }


if __name__ == "__main__":
    for written in DASHBOARDS:
        (FOLDER / f"{written.name}.json").write_text(content(written))
