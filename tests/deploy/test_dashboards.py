"""Dashboards: they match the writer's output, Grafana can read them, and they query existing series."""

import json
import os
import re
import shutil
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import combinations
from pathlib import Path
from typing import Any

import httpx2
import jsonschema
import pytest
import yaml
from deploy.monitoring.write_dashboards import DASHBOARDS, content
from tests.ports import reserved_ports
from tests.waiting import PATIENCE

FOLDER = Path(__file__).parents[2] / "deploy/monitoring/dashboards"
SOURCES = Path(__file__).parents[2] / "src/rackloom"
FILES = sorted(FOLDER.glob("*.json"))
SUFFIXES = ("", "_total", "_bucket", "_count", "_sum")
RATE_INTERVAL = "5m"
each_file = pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)

# The part of Grafana's documented JSON model (10 and later) that these dashboards use.

TEXT = {"type": "string", "minLength": 1}
SOURCE = {
    "type": "object",
    "required": ["type", "uid"],
    "properties": {"type": {"const": "prometheus"}, "uid": {"const": "${datasource}"}},
}
PANEL = {
    "type": "object",
    "required": ["id", "type", "title", "description", "datasource", "gridPos", "fieldConfig", "targets"],
    "additionalProperties": False,
    "properties": {
        "id": {"type": "integer", "minimum": 1},
        "type": {"enum": ["timeseries", "stat", "gauge", "bargauge", "table"]},
        "title": TEXT,
        "description": TEXT,
        "datasource": SOURCE,
        "gridPos": {
            "type": "object",
            "required": ["x", "y", "w", "h"],
            "additionalProperties": False,
            "properties": {
                "x": {"type": "integer", "minimum": 0, "maximum": 23},
                "y": {"type": "integer", "minimum": 0},
                "w": {"type": "integer", "minimum": 1, "maximum": 24},
                "h": {"type": "integer", "minimum": 1},
            },
        },
        "fieldConfig": {
            "type": "object",
            "required": ["defaults", "overrides"],
            "additionalProperties": False,
            "properties": {
                "defaults": {
                    "type": "object",
                    "required": ["unit"],
                    "additionalProperties": False,
                    "properties": {
                        "unit": {"enum": ["short", "s", "ms", "Bps", "percentunit"]},
                        "min": {"type": "number"},
                    },
                },
                "overrides": {"type": "array", "maxItems": 0},
            },
        },
        "options": {
            "type": "object",
            "additionalProperties": False,
            "properties": {
                "legend": {
                    "type": "object",
                    "required": ["displayMode", "placement", "showLegend"],
                    "properties": {
                        "displayMode": {"enum": ["list", "table", "hidden"]},
                        "placement": {"enum": ["bottom", "right"]},
                        "showLegend": {"type": "boolean"},
                    },
                }
            },
        },
        "targets": {
            "type": "array",
            "minItems": 1,
            "items": {
                "type": "object",
                "required": ["refId", "datasource", "expr", "legendFormat"],
                "additionalProperties": False,
                "properties": {
                    "refId": {"type": "string", "pattern": "^[A-Z]$"},
                    "datasource": SOURCE,
                    "expr": TEXT,
                    "legendFormat": TEXT,
                },
            },
        },
    },
}
DASHBOARD = {
    "type": "object",
    "required": ["title", "uid", "schemaVersion", "panels", "templating", "time"],
    "additionalProperties": False,
    "properties": {
        "title": TEXT,
        # Longer ones are refused.
        "uid": {"type": "string", "pattern": "^[A-Za-z0-9_-]{1,40}$"},
        "schemaVersion": {"type": "integer", "minimum": 36},
        "version": {"type": "integer", "minimum": 0},
        "editable": {"type": "boolean"},
        "refresh": {"type": "string", "pattern": r"^\d+(s|m|h|d)$"},
        "tags": {"type": "array", "items": TEXT, "uniqueItems": True},
        "time": {"type": "object", "required": ["from", "to"], "properties": {"from": TEXT, "to": TEXT}},
        "templating": {
            "type": "object",
            "required": ["list"],
            "properties": {
                "list": {
                    "type": "array",
                    "items": {
                        "type": "object",
                        "required": ["name", "type", "query"],
                        "properties": {"name": TEXT, "type": {"const": "datasource"}, "query": TEXT},
                    },
                }
            },
        },
        "panels": {"type": "array", "minItems": 1, "items": PANEL},
    },
}


def read(path: Path) -> Any:
    return json.loads(path.read_text())


def targets(path: Path) -> Iterator[dict[str, str]]:
    for panel in read(path)["panels"]:
        yield from panel["targets"]


def test_the_files_are_those_of_the_writer() -> None:
    assert {path.stem: path.read_text() for path in FILES} == {
        dashboard.name: content(dashboard) for dashboard in DASHBOARDS
    }
    assert {path.stem for path in FILES} == {"site", "claims", "gangs", "transfers"}


@each_file
def test_grafana_can_read_it(path: Path) -> None:
    jsonschema.Draft202012Validator(DASHBOARD).validate(read(path))


@pytest.mark.parametrize(
    ("at", "wrong"),
    [
        (("uid",), "x" * 41),
        (("panels", 0, "gridPos", "x"), 24),
        (("panels", 0, "type"), "graph"),
        (("panels", 0, "fieldConfig", "defaults", "unit"), "seconds"),
        (("panels", 0, "targets"), []),
        (("panels", 0, "targets", 0, "datasource", "uid"), "P1809F7CD0C75ACF3"),
    ],
)
def test_the_schema_refuses_what_grafana_would_not_show(at: tuple[Any, ...], wrong: object) -> None:
    dashboard = read(FILES[0])
    place = dashboard
    for key in at[:-1]:
        place = place[key]
    place[at[-1]] = wrong
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.Draft202012Validator(DASHBOARD).validate(dashboard)


def test_uids_differ() -> None:
    assert len({read(path)["uid"] for path in FILES}) == len(FILES)


@each_file
def test_panels_have_their_own_ids_and_places(path: Path) -> None:
    panels = read(path)["panels"]
    assert len({panel["id"] for panel in panels}) == len({panel["title"] for panel in panels}) == len(panels)
    for panel in panels:
        assert panel["gridPos"]["x"] + panel["gridPos"]["w"] <= 24
        assert len({target["refId"] for target in panel["targets"]}) == len(panel["targets"])
    for first, second in combinations([panel["gridPos"] for panel in panels], 2):
        apart = (
            first["x"] + first["w"] <= second["x"]
            or second["x"] + second["w"] <= first["x"]
            or first["y"] + first["h"] <= second["y"]
            or second["y"] + second["h"] <= first["y"]
        )
        assert apart, (first, second)


@each_file
def test_it_asks_for_series_that_the_programs_make(path: Path) -> None:
    """Those of a site are compared with its page in tests/app/test_serve_deployment.py."""
    sources = "".join(source.read_text() for source in SOURCES.rglob("*.py"))
    names = re.findall(r'"((?:rackloom|nvidia_dra)_\w+)"', sources)
    made = {name + suffix for name in names for suffix in SUFFIXES}
    asked = {
        name
        for target in targets(path)
        for name in re.findall(r"\b(?:rackloom|nvidia_dra)_\w+", target["expr"])
    }
    assert asked <= made


@pytest.mark.skipif(
    shutil.which("promtool") is None, reason="NO PROMTOOL: Debian's package prometheus has it"
)
def test_every_query_is_promql(tmp_path: Path) -> None:
    found = [target["expr"] for path in FILES for target in targets(path)]
    rules = [
        {"record": f"query:{number}", "expr": query.replace("$__rate_interval", RATE_INTERVAL)}
        for number, query in enumerate(found)
    ]
    file = tmp_path / "queries.yaml"
    file.write_text(yaml.safe_dump({"groups": [{"name": "queries", "rules": rules}]}))
    command = ["promtool", "check", "rules", "--lint=none", str(file)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=PATIENCE)
    assert done.returncode == 0, done.stdout + done.stderr
    assert len(found) > 50


@each_file
def test_legends_name_labels_that_the_query_keeps(path: Path) -> None:
    for target in targets(path):
        shown = set(re.findall(r"{{(\w+)}}", target["legendFormat"]))
        kept = {
            label.strip()
            for labels in re.findall(r"\bby \(([^)]*)\)", target["expr"])
            for label in labels.split(",")
        }
        assert shown <= kept, target


def test_kustomize_names_each_file() -> None:
    found = yaml.safe_load((FOLDER / "kustomization.yaml").read_text())
    (generated,) = found["configMapGenerator"]
    assert sorted(generated["files"]) == [path.name for path in FILES]


# A real Grafana.


GRAFANA = os.environ.get("RACKLOOM_GRAFANA") or shutil.which("grafana")


@contextmanager
def grafana(folder: Path) -> Iterator[str]:
    """A Grafana that is provisioned with the dashboards. Yields its URL."""
    program = Path(str(GRAFANA)).resolve()
    packaged = Path("/usr/share/grafana")
    home = program.parent.parent if (program.parent.parent / "conf").is_dir() else packaged
    provisioning = folder / "provisioning"
    for name in ("dashboards", "datasources", "alerting", "plugins"):
        (provisioning / name).mkdir(parents=True)
    provider = {"name": "rackloom", "type": "file", "options": {"path": str(FOLDER)}}
    (provisioning / "dashboards/rackloom.yaml").write_text(
        yaml.safe_dump({"apiVersion": 1, "providers": [provider]})
    )
    with reserved_ports() as port:
        url = f"http://127.0.0.1:{port}"
    settings = {
        "GF_SERVER_HTTP_ADDR": "127.0.0.1",
        "GF_SERVER_HTTP_PORT": str(port),
        "GF_PATHS_DATA": str(folder / "data"),
        "GF_PATHS_LOGS": str(folder / "logs"),
        "GF_PATHS_PLUGINS": str(folder / "plugins"),
        "GF_PATHS_PROVISIONING": str(provisioning),
        "GF_ANALYTICS_REPORTING_ENABLED": "false",
        "GF_ANALYTICS_CHECK_FOR_UPDATES": "false",
        "GF_AUTH_ANONYMOUS_ENABLED": "true",
        "GF_AUTH_ANONYMOUS_ORG_ROLE": "Admin",
    }
    with (folder / "grafana.log").open("w") as log:
        process = subprocess.Popen(
            [str(program), "server", "--homepath", str(home)],
            env=os.environ | settings,
            stdout=log,
            stderr=log,
        )
    try:
        yield url
    finally:
        process.terminate()
        process.wait(PATIENCE)


@pytest.mark.slow
@pytest.mark.skipif(
    GRAFANA is None, reason="NO GRAFANA: name its program in RACKLOOM_GRAFANA, or put grafana on the PATH"
)
def test_a_real_grafana_loads_them(tmp_path: Path) -> None:
    with grafana(tmp_path) as url, httpx2.Client(base_url=url, timeout=PATIENCE) as client:
        deadline = time.monotonic() + PATIENCE
        wanted = {read(path)["uid"]: read(path) for path in FILES}
        loaded: dict[str, Any] = {}
        while loaded.keys() != wanted.keys():
            assert time.monotonic() < deadline, (tmp_path / "grafana.log").read_text()[-2000:]
            time.sleep(0.5)
            try:
                for uid in wanted.keys() - loaded.keys():
                    answer = client.get(f"/api/dashboards/uid/{uid}")
                    if answer.is_success:
                        loaded[uid] = answer.json()["dashboard"]
            except httpx2.TransportError:
                continue  # It has not opened its port yet.
        for uid, dashboard in loaded.items():
            assert [panel["title"] for panel in dashboard["panels"]] == [
                panel["title"] for panel in wanted[uid]["panels"]
            ]
