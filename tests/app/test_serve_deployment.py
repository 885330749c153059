"""The files shipped to run the service: they agree with the code, and a backup brings the site back."""

import asyncio
import configparser
import json
import re
import sqlite3
from contextlib import closing
from pathlib import Path

import pytest
import sqlalchemy as sa
import yaml
from alembic import command
from alembic.config import Config as Alembic

from rackloom.app.config import load_config
from rackloom.app.site.metrics import SiteMetrics
from rackloom.app.site.record_counts import DomainCounts, SiteCounts
from rackloom.app.site.secret_stores import secret_name
from rackloom.app.site.service import site_service
from rackloom.app.site.switches import SECRET_FAMILY
from rackloom.carve.admin.endpoints import NMX_M_CREDENTIAL
from rackloom.carve.fabric.controller import ControllerKind
from rackloom.carve.inventory import endpoints
from rackloom.carve.store import schema as migrate_module
from rackloom.carve.store.journal import OperatorOrder

SITE = Path(__file__).parents[2] / "deploy" / "site"
MONITORING = SITE.parent / "monitoring"
BASE = SITE / "base"


def _objects():
    names = yaml.safe_load((BASE / "kustomization.yaml").read_text())["resources"]
    return [manifest for name in names for manifest in yaml.safe_load_all((BASE / name).read_text())]


def _metric_names():
    domains = tuple(
        DomainCounts(
            uuid=kind,
            kind=kind,
            observed_at=0.0,
            partitions={"healthy": 1},
            gpus={"healthy": 1},
            nodes={"healthy": 1},
            multicast_groups={"used": 1, "limit": 2},
        )
        for kind in ControllerKind
    )
    counts = SiteCounts(
        logical_partitions=0,
        physical_partitions=0,
        endpoints={"known": 1},
        domains=domains,
        ready_seconds=(),
        newest_history=0,
    )
    metrics = SiteMetrics("nico_")
    metrics.drifted("d", 1)
    metrics.watch_issuer("https://issuer", lambda: 0.0)
    metrics.connections_ended("rest")
    page = metrics.page(counts, 0.0).decode()
    return {re.split(r"[{ ]", line)[0] for line in page.splitlines() if not line.startswith("#")}


def test_the_base_looks_and_does_not_act_before_its_operator_says_so(monkeypatch):
    monkeypatch.setenv("RACKLOOM_DATABASE__POSTGRESQL", "postgresql://u@db/site")
    config = load_config(BASE / "site.toml")
    assert config.nvlink_config.domain_discovery_enabled
    assert not config.nvlink_config.enabled
    assert config.admin.admin_names


def test_the_deployment_mounts_what_the_configuration_names():
    config = (BASE / "site.toml").read_text()
    (deployment,) = [obj for obj in _objects() if obj["kind"] == "Deployment"]
    (container,) = deployment["spec"]["template"]["spec"]["containers"]
    mounted = [mount["mountPath"] for mount in container["volumeMounts"]]
    for path in re.findall(r'"(/etc/rackloom/[^"]+)/[^/"]+"', config):
        assert path in mounted
    ports = {port["containerPort"] for port in container["ports"]}
    assert ports == {int(port) for port in re.findall(r'listen = "0\.0\.0\.0:(\d+)"', config)}
    assert {container[probe]["httpGet"]["path"] for probe in ("livenessProbe", "readinessProbe")} == {
        "/healthz",
        "/readyz",
    }


def test_the_pod_has_no_more_than_it_needs():
    (deployment,) = [obj for obj in _objects() if obj["kind"] == "Deployment"]
    pod = deployment["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    assert pod["securityContext"]["runAsNonRoot"]
    assert container["securityContext"] == {
        "allowPrivilegeEscalation": False,
        "readOnlyRootFilesystem": True,
        "capabilities": {"drop": ["ALL"]},
    }
    (role,) = [obj for obj in _objects() if obj["kind"] == "Role"]
    assert all(rule["resources"] == ["secrets"] for rule in role["rules"])
    assert not any("list" in rule["verbs"] or "*" in rule["verbs"] for rule in role["rules"])


def test_the_role_allows_every_secret_that_a_chassis_may_have():
    (role,) = [obj for obj in _objects() if obj["kind"] == "Role"]
    reading = [rule for rule in role["rules"] if "get" in rule["verbs"]]

    def may_read(path):
        return any(secret_name(path) in rule.get("resourceNames", [secret_name(path)]) for rule in reading)

    # Kubernetes answers 403, not 404, for a name that is not allowed: that chassis could not be spoken to.
    for kind in SECRET_FAMILY.values():
        assert may_read(f"{kind}/SERIAL-1/tls")
    assert may_read("nmxm/SERIAL-1/auth")
    assert may_read(NMX_M_CREDENTIAL)
    writing = [rule for rule in role["rules"] if {"update", "delete"} & set(rule["verbs"])]
    assert [rule["resourceNames"] for rule in writing] == [[secret_name(NMX_M_CREDENTIAL)]]


def test_every_resource_that_is_named_is_there():
    assert {obj["kind"] for obj in _objects()} >= {"Namespace", "Deployment", "Service", "NetworkPolicy"}


def test_alerts_and_dashboard_ask_for_metrics_that_exist():
    rules = yaml.safe_load((MONITORING / "site-alerts.yaml").read_text())["groups"][0]["rules"]
    panels = json.loads((MONITORING / "dashboards/site.json").read_text())["panels"]
    expressions = [rule["expr"] for rule in rules]
    expressions += [target["expr"] for panel in panels for target in panel["targets"]]
    asked = {name for expression in expressions for name in re.findall(r"nico_\w+", expression)}
    assert asked <= _metric_names()
    assert len(asked) > 10
    assert all(rule["annotations"]["action"] for rule in rules)


def test_the_unit_is_hardened_and_starts_the_service():
    unit = configparser.ConfigParser(strict=False, interpolation=None)
    unit.optionxform = str
    unit.read(SITE / "rackloom.service")
    section = unit["Service"]
    assert section["ExecStart"].endswith("rackloom serve --config /etc/rackloom/site.toml")
    assert (section["DynamicUser"], section["ProtectSystem"]) == ("yes", "strict")
    assert section["CapabilityBoundingSet"] == ""


@pytest.mark.slow
def test_a_backup_of_a_running_service_brings_it_back(ground, tmp_path):
    async def before():
        async with site_service(load_config(ground.config())) as site:
            order = OperatorOrder("test", "", site.reconciler.clock())
            await site.store.run(
                endpoints.create_chassis_endpoint, "S1", "https://switch", order, lambda: "e1"
            )
            (tmp_path / "restored").mkdir()
            source = ground.directory / "home" / "site.db"
            with (
                closing(sqlite3.connect(source)) as live,
                closing(sqlite3.connect(tmp_path / "restored" / "site.db")) as copy,
            ):
                live.backup(copy)

    async def after():
        path = ground.config()
        path.write_text(path.read_text().replace("/home", "/restored"))
        async with site_service(load_config(path)) as site:
            return await site.store.read(endpoints.all_endpoints)

    asyncio.run(before())
    (found,) = asyncio.run(after())
    assert (found.chassis_serials, found.url, found.domain) == (("S1",), "https://switch", None)


@pytest.mark.slow
def test_the_database_of_the_first_release_is_upgraded(ground):
    home = ground.directory / "home"
    home.mkdir()
    engine = sa.create_engine(f"sqlite:///{home / 'site.db'}")
    with engine.begin() as conn:
        alembic = Alembic()
        scripts = Path(migrate_module.__file__).parent / "migrations"
        alembic.set_main_option("script_location", str(scripts))
        alembic.attributes["connection"] = conn
        command.upgrade(alembic, "0019")
        insert = "INSERT INTO provider (id, org, created, updated) VALUES ('p', 'acme', 1, 1)"
        conn.exec_driver_sql(insert)
    engine.dispose()

    async def start():
        async with site_service(load_config(ground.config())) as site:
            provider = sa.text("SELECT id FROM provider WHERE org = 'acme'")
            return await site.store.read(lambda conn: conn.execute(provider).scalar_one())

    assert asyncio.run(start()) == "p"
