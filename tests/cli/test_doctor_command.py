"""`rackloom doctor` on the home of an embedded site: beside the running service, after it, and on nothing."""

import json
import re
import subprocess
import sys

import pytest
from anyio.from_thread import start_blocking_portal
from inline_snapshot import snapshot
from tests.app.embedded_site import embedded_site

from rackloom.app.home import Home, default_home
from rackloom.cli.doctor import doctor
from rackloom.core.diagnosis.catalogue import Check
from rackloom.errors import Refused
from rackloom.lab.switches.fabric import FabricPartition

RACKLOOM = [sys.executable, "-m", "rackloom.cli.main"]
CHANGING = (
    (re.compile(r"[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}"), "DOMAIN"),
    (re.compile(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ"), "TIME"),
    (re.compile(r"127\.0\.0\.1:\d+"), "SWITCH"),
    (re.compile(r"SIM[0-9A-F]{10}"), "SERIAL"),
    (re.compile(r"sim[0-9a-f]{10}"), "serial"),
)


def rackloom(*arguments, **environment):
    return subprocess.run(
        [*RACKLOOM, *arguments], capture_output=True, text=True, timeout=120, env=environment or None
    )


class Diagnosis:
    """The output and exit code of the command, without the parts that differ from run to run."""

    def __init__(self, capsys, home):
        self.capsys, self.home = capsys, home

    def __call__(self, **options):
        self.code = doctor(home=self.home, **options)
        text = self.capsys.readouterr().out.replace(str(self.home), "HOME")
        for pattern, name in CHANGING:
            text = pattern.sub(name, text)
        return text


@pytest.fixture(scope="module")
def portal():
    with start_blocking_portal() as portal:
        yield portal


@pytest.fixture
def diagnosis(capsys, tmp_path):
    return Diagnosis(capsys, tmp_path / "home")


@pytest.fixture
def site(portal, diagnosis):
    made = embedded_site(Home(diagnosis.home), port=0, racks=1, profile="gb200-nvl72")
    with portal.wrap_async_context_manager(made) as site:
        yield site


def test_nothing_is_wrong_with_a_new_site(site, diagnosis):
    assert diagnosis() == snapshot("""\
examined:
  fabric (simulated): 1 domain, 72 GPUs, 0 partitions, read TIME
  site (simulated): 18 machines, 0 logical partitions, read TIME
what is simulated says nothing of real machines

all holds
""")
    assert diagnosis.code == 0


def test_json_says_ok_and_nothing_else(site, diagnosis):
    assert json.loads(diagnosis(output="json")) == {"ok": True, "simulated": True, "findings": []}


def break_it(portal, site):
    """An unmanaged partition on a free tray."""
    (server,) = site.twin.servers.values()
    (domain,) = site.twin.servers
    first = min(server.fabric.gpus.values(), key=lambda gpu: (gpu.tray_index, gpu.module_id))
    tray = [gpu.guid for gpu in server.fabric.gpus.values() if gpu.tray_index == first.tray_index]

    async def change():
        server.fabric.put(FabricPartition(id=9, name="by-hand", guids=tuple(tray), multicast_groups=0))
        site.deps.wake(frozenset({domain}))

    portal.call(change)


def until_found(diagnosis, check):
    for _ in range(600):
        found = json.loads(diagnosis(output="json"))["findings"]
        if [finding["check"] for finding in found] == [check]:
            return found[0]
    raise AssertionError(f"{check} was not found, but {found}")


def test_a_fault_is_told_with_both_sides_and_the_fix(portal, site, diagnosis, tmp_path):
    break_it(portal, site)
    finding = until_found(diagnosis, Check.PARTITION_OWNED)
    assert finding["severity"] == "warning"
    metrics = tmp_path / "doctor.prom"
    assert diagnosis(textfile=metrics) == snapshot("""\
examined:
  fabric (simulated): 1 domain, 72 GPUs, 1 partition, read TIME
  site (simulated): 18 machines, 0 logical partitions, read TIME
what is simulated says nothing of real machines

WARNING   Somebody else made partition by-hand
  partition owned: partition by-hand: it was made by somebody else: nobody asked for it; it keeps instances off 1 empty tray: serial-0
    switch controller: partition 9 of domain DOMAIN, with 4 GPUs
    records: nobody here made it
  1. rackloom token --home HOME --org demo --role PROVIDER_ADMIN
     safe: prints a token; keep it secret
  note: rackloom up serves REST alone: with this token it does what elsewhere does rackloom admin partition release --domain DOMAIN --name by-hand --reason unknown; or adopt it
  runbook: rackloom doctor --runbook partition-owned

1 finding: 1 warning
""")  # noqa: E501 (a line as it is printed)
    assert diagnosis.code == 1
    written = metrics.read_text()
    assert "rackloom_doctor_ok 0.0" in written
    assert 'rackloom_doctor_findings{check="partition owned",severity="warning"} 1.0' in written
    assert 'rackloom_doctor_findings{check="tenants apart",severity="error"} 0.0' in written
    assert [path.name for path in tmp_path.iterdir() if path.is_file()] == ["doctor.prom"]


def test_acceptance_results_are_exported(site, diagnosis):
    exported = json.loads(diagnosis(evidence="ncp"))
    assert (exported["suite"], exported["simulated"]) == ("ncp", True)
    assert "pass" not in {result["outcome"] for result in exported["results"]}
    assert {result["id"]: result["outcome"] for result in exported["results"]}["SDN12"] == "not run"


def test_when_the_service_is_stopped_its_readings_are_no_longer_how_things_are(portal, diagnosis):
    made = embedded_site(Home(diagnosis.home), port=0, racks=1, profile="gb200-nvl72")
    with portal.wrap_async_context_manager(made):
        pass
    before = sorted(path.name for path in diagnosis.home.iterdir())
    assert diagnosis() == snapshot("""\
examined:
  fabric (simulated): unknown since TIME: the site service, which reads the switch controllers, is not running
  site (simulated): 18 machines, 0 logical partitions, read TIME
what is simulated says nothing of real machines

UNKNOWN   Layer fabric cannot be read  since TIME
  layer readable: layer fabric: the site service, which reads the switch controllers, is not running
  and therefore:
    switch controller: domain DOMAIN
  1. rackloom up --home HOME
     disruptive: starts the site again
  runbook: rackloom doctor --runbook layer-readable

1 finding: 1 unknown
""")
    assert diagnosis.code == 1
    assert sorted(path.name for path in diagnosis.home.iterdir()) == before


def test_a_file_that_cannot_be_written_is_refused(site, diagnosis, tmp_path):
    with pytest.raises(Refused, match="could not be written") as refused:
        diagnosis(textfile=tmp_path / "nowhere" / "doctor.prom")
    assert "collector" in refused.value.nearest_fix


@pytest.mark.slow
def test_nothing_to_examine_names_what_to_give(tmp_path):
    asked = rackloom("doctor", XDG_DATA_HOME=str(tmp_path), PATH="/bin")
    assert asked.returncode == 1
    assert asked.stdout == ""
    assert asked.stderr.replace(str(tmp_path), "DATA") == snapshot("""\
rackloom: there is nothing to examine: no site in DATA/rackloom
  fix: give --home of a `rackloom up`, --config of a `rackloom serve`, --cluster, --kubeconfig, or --sysroot
""")


def test_a_configured_site_is_read_from_its_database(site, diagnosis, tmp_path):
    config = tmp_path / "site.toml"
    config.write_text(
        f"""
[site]
name = "lab"
provider_org = "demo"
[database]
sqlite = "{diagnosis.home}"
[nvlink_config]
allow_insecure = true
"""
    )
    assert doctor(config=config, output="json") == 0
    assert json.loads(diagnosis.capsys.readouterr().out) == {"ok": True, "simulated": True, "findings": []}


def test_a_folder_of_transfers_that_is_not_there_is_refused(site, diagnosis, tmp_path):
    with pytest.raises(Refused, match="is no directory"):
        diagnosis(transfers=tmp_path / "nowhere")


def test_two_sites_at_once_are_refused(tmp_path):
    with pytest.raises(Refused, match="two sites"):
        doctor(home=tmp_path, config=tmp_path / "site.toml")


def test_two_sites_at_once_are_a_wrong_command_line(tmp_path):
    done = rackloom("doctor", "--home", str(tmp_path), "--config", str(tmp_path / "site.toml"))
    assert (done.returncode, done.stdout) == (2, "")
    assert "--home and --config name two sites: give one of them" in done.stderr


def test_a_home_without_a_site_is_refused(tmp_path):
    with pytest.raises(Refused, match="there is no site") as refused:
        doctor(home=tmp_path)
    assert "--home" in refused.value.nearest_fix


def test_a_database_of_somebody_else_is_refused(tmp_path):
    (tmp_path / "site.db").write_bytes(b"not a database, but long enough to look at" * 20)
    with pytest.raises(Refused, match="cannot be read"):
        doctor(home=tmp_path)


def test_a_cluster_that_does_not_answer_is_unknown_and_no_failure(site, diagnosis, tmp_path):
    config = tmp_path / "kubeconfig"
    config.write_text(
        """
apiVersion: v1
kind: Config
clusters: [{name: c, cluster: {server: "http://127.0.0.1:9"}}]
users: [{name: u, user: {}}]
contexts: [{name: c, context: {cluster: c, user: u}}]
current-context: c
"""
    )
    found = json.loads(diagnosis(kubeconfig=config, output="json"))["findings"]
    assert [(finding["check"], finding["state"], finding["severity"]) for finding in found] == [
        (Check.LAYER, "unknown", "unknown")
    ]
    assert diagnosis.code == 1


def test_a_transfer_record_that_cannot_be_read_makes_its_layer_unknown(site, diagnosis, tmp_path):
    folder = tmp_path / "transfers"
    folder.mkdir()
    (folder / "b.json").write_text('{"format": "rackl')
    found = json.loads(diagnosis(transfers=folder, output="json"))["findings"]
    assert [(finding["subject"], finding["state"]) for finding in found] == [("layer transfer", "unknown")]
    assert "b.json" in found[0]["message"]


def test_whoever_watches_the_file_learns_that_nothing_could_be_read(tmp_path):
    metrics = tmp_path / "doctor.prom"
    metrics.write_text("rackloom_doctor_ok 1.0\n")
    (tmp_path / "site.db").write_bytes(b"not a database, but long enough to look at" * 20)
    with pytest.raises(Refused, match="cannot be read"):
        doctor(home=tmp_path, textfile=metrics)
    assert "rackloom_doctor_ok 0.0" in metrics.read_text()


def test_a_home_may_have_any_name(portal, capsys, tmp_path):
    home = tmp_path / "what? a #home%20"
    with portal.wrap_async_context_manager(
        embedded_site(Home(tmp_path / "plain"), port=0, racks=1, profile="gb200-nvl72")
    ):
        pass
    (tmp_path / "plain").rename(home)
    assert doctor(home=home) == 1
    output = capsys.readouterr().out
    assert "site (simulated): 18 machines" in output
    assert f"1. rackloom up --home '{home}'" in output


def test_the_home_of_every_command_may_stand_in_the_environment(monkeypatch, tmp_path):
    monkeypatch.setenv("RACKLOOM_HOME", str(tmp_path))
    assert default_home() == tmp_path
