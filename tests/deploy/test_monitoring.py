"""Alerts and the Prometheus operator's objects: series exist, and each alert fires in a scenario."""

import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml
from tests.waiting import PATIENCE

from deploy.monitoring import write_rules
from rackloom.claim.cluster.gang_controller import PLACED_REASONS
from rackloom.claim.node.prepare import PREPARE_ERRORS, UNPREPARE_ERRORS
from rackloom.core.cluster.domain_objects import Readiness
from rackloom.core.cluster.gang_objects import WARNING_REASONS
from rackloom.core.gangs.reconcile import API_REFUSED

ROOT = Path(__file__).parents[2]
MONITORING = ROOT / "deploy/monitoring"
SCENARIOS = sorted((ROOT / "tests/deploy/monitoring").glob("*.test.yaml"))
SUFFIXES = ("", "_total", "_bucket", "_count", "_sum")
needs_promtool = pytest.mark.skipif(
    shutil.which("promtool") is None, reason="NO PROMTOOL: Debian's package prometheus has it"
)
each_scenario = pytest.mark.parametrize("path", SCENARIOS, ids=lambda path: path.name)


def alerts(name: str) -> list[dict[str, Any]]:
    groups = yaml.safe_load((MONITORING / f"{name}.yaml").read_text())["groups"]
    return [rule for group in groups for rule in group["rules"]]


@pytest.mark.slow
@needs_promtool
@each_scenario
def test_alerts_fire_when_they_should_and_only_then(path: Path) -> None:
    command = ["promtool", "test", "rules", path.name]
    done = subprocess.run(
        command, cwd=path.parent, capture_output=True, text=True, check=False, timeout=PATIENCE
    )
    assert done.returncode == 0, done.stdout + done.stderr


@each_scenario
def test_each_alert_fires_in_a_scenario(path: Path) -> None:
    tests = yaml.safe_load(path.read_text())["tests"]
    fired = {rule["alertname"] for test in tests for rule in test["alert_rule_test"] if rule["exp_alerts"]}
    assert fired == {rule["alert"] for rule in alerts(path.name.replace(".test.yaml", "-alerts"))}


def test_alerts_of_a_cluster_ask_for_series_that_the_programs_have() -> None:
    sources = "".join(path.read_text() for path in (ROOT / "src/rackloom").rglob("*.py"))
    made = {
        name + suffix
        for name in re.findall(r'"((?:rackloom|nvidia_dra)_\w+)"', sources)
        for suffix in SUFFIXES
    }
    asked = {
        name
        for rule in alerts("cluster-alerts")
        for name in re.findall(r"\b(?:rackloom|nvidia_dra)_\w+", rule["expr"])
    }
    assert len(asked) > 8
    assert asked <= made


def test_alerts_name_values_of_labels_that_the_programs_have() -> None:
    """A pattern that no value meets would never fire."""
    values = {
        "rackloom_gangs": PLACED_REASONS,
        "rackloom_gang_refusals_total": (*WARNING_REASONS, API_REFUSED),
        "nvidia_dra_compute_domain_info": tuple(Readiness),
    }
    for rule in alerts("cluster-alerts"):
        for series, label, pattern in re.findall(r"(\w+){(\w+)=~?\"([^\"]*)\"", rule["expr"]):
            if series in values:
                for choice in pattern.split("|"):
                    found = [value for value in values[series] if re.fullmatch(choice, value)]
                    assert found, (rule["alert"], label, choice)


def test_scenarios_use_values_of_labels_that_the_programs_have() -> None:
    scenarios = "".join(path.read_text() for path in SCENARIOS)
    kinds = set(re.findall(r'error_type="(\w+)"', scenarios))
    assert kinds
    assert kinds <= {*PREPARE_ERRORS, *UNPREPARE_ERRORS}
    reasons = set(re.findall(r'reason="(\w+)"', scenarios))
    assert reasons <= {*PLACED_REASONS, *WARNING_REASONS, API_REFUSED}


@pytest.mark.parametrize("name", ["site-alerts", "cluster-alerts"])
def test_the_page_lists_each_alert(name: str) -> None:
    page = (ROOT / "docs/monitoring.md").read_text()
    for rule in alerts(name):
        assert page.count(f"| `{rule['alert']}` |") == 1, rule["alert"]


@pytest.mark.parametrize("name", ["site-alerts", "cluster-alerts"])
def test_alerts_say_what_to_do(name: str) -> None:
    for rule in alerts(name):
        assert set(rule["annotations"]) == {"summary", "action"}
        assert rule["labels"]["severity"] in ("warning", "critical")


def test_the_operator_gets_the_same_rules() -> None:
    assert (MONITORING / "operator/rules.yaml").read_text() == write_rules.rules()


def test_monitors_name_ports_and_jobs_that_exist() -> None:
    """Ports match those of the pods, and jobs match those in the alerts' queries."""
    monitors = list(yaml.safe_load_all((MONITORING / "operator/monitors.yaml").read_text()))
    pods, webhook, service = monitors
    kubernetes = ROOT / "deploy/kubernetes"
    manifests = "".join(
        path.read_text() for part in ("base", "webhook") for path in (kubernetes / part).glob("*.yaml")
    )
    for endpoint in pods["spec"]["podMetricsEndpoints"] + webhook["spec"]["podMetricsEndpoints"]:
        assert f"name: {endpoint['port']}, containerPort" in manifests
    (endpoint,) = webhook["spec"]["podMetricsEndpoints"]
    assert (endpoint["scheme"], endpoint["relabelings"][0]["replacement"]) == ("https", "rackloom-webhook")
    assert service["spec"]["endpoints"][0]["relabelings"][0]["replacement"] == "rackloom-site"
    (components,) = (term["values"] for term in pods["spec"]["selector"]["matchExpressions"])
    gone = next(rule["expr"] for rule in alerts("cluster-alerts") if rule["alert"] == "RackloomPodGone")
    jobs = re.search(r"rackloom-\((.*?)\)", gone)
    assert jobs is not None
    assert set(components) <= set(jobs.group(1).split("|"))
