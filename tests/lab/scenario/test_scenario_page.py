"""The page of scenarios is complete, and a shipped scenario plays every known incident."""

import re

from docs.site.reference import scenarios

from rackloom.lab.scenario.reading import ACTIONS, EXPECTATIONS, shipped_scenarios

INCIDENTS = {
    "NMX-C unreachable (NICo #2614)": (
        "switch-unreachable",
        "switch-dark",
    ),
    "NMX-C slow": ("switch-slow",),
    "NMX-C restarts": (
        "switch-restarts",
        "switch-lost-names",
        "switch-lost-partitions",
    ),
    "leader moves to another switch tray": (
        "switch-leader-moves",
        "switch-standby-leads",
        "switch-old-leader-returns",
        "switch-restarts",
        "switches-contradict",
    ),
    "change accepted, but lost": (
        "change-accepted-only",
        "header-missing",
    ),
    "change applied late": (
        "change-applied-late",
        "reply-lost",
    ),
    "change applied twice": ("change-applied-twice",),
    "list that omits a partition for a while": ("list-omits-partition",),
    "partition created outside (NICo #304)": (
        "partition-by-hand",
        "nmxm-unreachable",
    ),
    "full-list PUT race of NMX-M (NICo #395)": ("nmxm-list-race",),
    "GPU resets": (
        "gpu-xid",
        "gpu-lost",
    ),
    "GPU health NO_NVLINK": ("gpu-no-nvlink",),
    "GPU health DEGRADED_BW": ("gpu-degraded-bandwidth",),
    "switch tray out (9 to 8)": ("switch-tray-out",),
    "tray swapped: new GPU UIDs, same slot (NICo #4761)": (
        "tray-swapped",
        "tray-swapped-under-cluster",
    ),
    "fabric state transitional (driver #1264)": ("fabric-in-transition",),
    "clique label stale for up to 60 s": (
        "clique-label-stale",
        "clique-label-of-another-hand",
    ),
    "clique label absent": (
        "tray-split-loses-label",
        "fabric-in-transition",
    ),
    "clusterUUID changes after a restart": (
        "domain-uuid-changes",
        "domain-uuid-changes-under-job",
    ),
    "API server: conflict": (
        "api-conflicts",
        "api-replies-lost",
    ),
    "API server: stale watches": ("api-reads-stale",),
    "API server: dropped watch": (
        "watches-drop",
        "api-server-down",
    ),
    "API server: 410 Gone": ("watches-expire",),
    "API server: duplicate events": ("api-events-twice",),
    "API server: reordered events": ("api-events-late",),
    "IMEX daemon dead": ("imex-daemon-killed",),
    "IMEX index churn (driver #1418)": ("imex-index-churn",),
    "pod IP reused (driver #1447)": ("pod-ip-reused",),
    "node lost in a rack-wide job (driver #348)": (
        "node-lost",
        "gang-node-lost",
        "node-reboots",
    ),
    "controller killed between any two writes": (
        "controllers-die-at-each-write",
        "gang-controllers-die",
        "service-dies-at-each-write",
        "controllers-killed",
    ),
    "clock jump": (
        "clock-set-back",
        "controllers-clock-set",
    ),
    "two controllers at once": (
        "controllers-leader-lost",
        "controllers-doubled",
        "two-processes",
    ),
}
"""Incidents that others reported or that are known to happen, with the shipped scenarios for each."""


def test_every_incident_is_played_by_files_that_ship() -> None:
    shipped = {scenario.name for scenario in shipped_scenarios()}
    missing = {incident: set(names) - shipped for incident, names in INCIDENTS.items()}
    assert {incident: names for incident, names in missing.items() if names} == {}


def test_the_page_has_a_row_for_each_step_and_each_shipped_scenario() -> None:
    page = scenarios.page()
    for heading, names in (
        ("## Actions", ACTIONS),
        ("## Expectations", EXPECTATIONS),
        ("## Shipped scenarios", [scenario.name for scenario in shipped_scenarios()]),
    ):
        section = page.split(f"{heading}\n")[1].split("\n## ")[0]
        assert sorted(re.findall(r"^\| `([\w-]+)`", section, re.MULTILINE)) == sorted(names)


def test_a_step_shows_its_keys_and_its_clock() -> None:
    rows = {name: scenarios.step_row(kind) for name, kind in (ACTIONS | EXPECTATIONS).items()}
    assert rows["make-instances"][:2] == ("`make-instances`", "`group`, `vpc`, `count`?, `tenant`?")
    assert rows["service-dies"][2].endswith("(virtual time)")
    assert not rows["together"][2].endswith("(virtual time)")
