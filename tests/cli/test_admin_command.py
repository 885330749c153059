"""`rackloom admin` against a whole service over a simulated rack: one operator's day, as a transcript."""

import importlib.util
import io
import json
import re
import shlex
from pathlib import Path

import pytest
import structlog
import yaml
from anyio.from_thread import start_blocking_portal
from inline_snapshot import external_file
from tests.waiting import until_seen

from rackloom.app.config import load_config
from rackloom.app.site.service import site_service
from rackloom.cli.admin import app
from rackloom.errors import Refused, Retry

UUID = re.compile(r"[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}")


@pytest.fixture(scope="module")
def ground(tmp_path_factory, authority):
    path = Path(__file__).parents[1] / "app" / "conftest.py"
    spec = importlib.util.spec_from_file_location("ground_of_a_site", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.Ground(tmp_path_factory.mktemp("site"), authority)


@pytest.fixture(scope="module")
def running(ground):
    """A service with one rack that nobody has registered yet; its switch and its admin port."""
    # The service logs in the same process, and its lines are not the command's.
    structlog.configure(
        processors=[structlog.processors.JSONRenderer()],
        wrapper_class=structlog.BoundLogger,
        logger_factory=structlog.ReturnLoggerFactory(),
    )
    with (
        start_blocking_portal() as portal,
        portal.wrap_async_context_manager(ground.racks()) as (switch,),
        portal.wrap_async_context_manager(site_service(load_config(ground.config()))) as site,
    ):
        yield switch, site
    structlog.reset_defaults()


class Desk:
    """An operator's terminal: runs commands, and keeps what was typed and printed."""

    def __init__(self, ground, switch, site, monkeypatch, capsys):
        self.switch, self.capsys, self.monkeypatch = switch, capsys, monkeypatch
        self.names = {}
        self.lines = []
        monkeypatch.chdir(ground.directory)
        monkeypatch.setenv("RACKLOOM_ADMIN_SITE", f"localhost:{site.admin_port}")
        monkeypatch.setenv("RACKLOOM_ADMIN_CA", str(ground.ca))
        self.ground = ground
        self.sit_down("admin")

    def sit_down(self, name):
        crt, key = self.ground.files[name]
        self.monkeypatch.setenv("RACKLOOM_ADMIN_CERT", str(crt))
        self.monkeypatch.setenv("RACKLOOM_ADMIN_KEY", str(key))

    def quietly(self, line):
        """The output of a command that is not kept."""
        self.capsys.readouterr()
        app(shlex.split(line), result_action="return_value")
        return self.capsys.readouterr().out

    def run(self, line):
        self.capsys.readouterr()
        try:
            code = app(shlex.split(line), result_action="return_value") or 0
            said = self.capsys.readouterr().out
        except Refused as refused:
            fix = f"\n  fix: {refused.nearest_fix}" if refused.nearest_fix else ""
            code, said = 1, f"rackloom: {refused.reason}{fix}\n"
        self.lines += [
            f"$ rackloom admin {line}",
            said.rstrip("\n"),
            *([f"[exit {code}]"] if code else []),
            "",
        ]
        return said

    def until(self, line, holds):
        def look():
            said = self.quietly(line)
            return said if holds(said) else None

        return until_seen(look, line)

    def transcript(self):
        """With the ids that are made anew each time replaced by numbered ones, and times by a word."""
        numbers = {self.switch.fabric.domain: self.switch.fabric.domain}
        text = UUID.sub(
            lambda found: numbers.setdefault(found[0], f"00000000-0000-4000-8000-{len(numbers):012}"),
            "\n".join(self.lines),
        )
        text = text.replace(self.switch.url, "https://switch:9370")
        return re.sub(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ", "TIME", text) + "\n"


@pytest.fixture
def desk(ground, running, monkeypatch, capsys):
    return Desk(ground, *running, monkeypatch, capsys)


@pytest.mark.slow
def test_an_operators_day(desk):
    switch = desk.switch
    (serial,) = {gpu.chassis_serial for gpu in switch.fabric.gpus.values()}
    domain = switch.fabric.domain
    machine = f"{serial}-0".lower()
    desk.run("endpoint show")
    desk.run(f"endpoint create --chassis-serial {serial} --endpoint {switch.url}")
    desk.run(f"endpoint create --chassis-serial {serial} --endpoint {switch.url}")
    desk.run("endpoint create --chassis-serial S2 --endpoint http://10.0.0.1")
    desk.run("endpoint create --chassis-serial S3 --endpoint https://10.0.0.1 --kind nmx-m")
    desk.run("endpoint update --chassis-serial S3 --endpoint https://10.0.0.2/nmx/v1 --kind nmx-c")
    desk.run("endpoint show")
    desk.run("endpoint delete --chassis-serial S3")
    desk.until("machine list", lambda said: domain in said)
    desk.until("partition show", lambda said: "Default" not in said)
    desk.run("machine list")
    desk.run(f"machine nvlink-info show {machine} -o table")
    desk.run(f"machine nvlink-info populate {machine} --update-db")
    desk.run("machine nvlink-info show nowhere")
    Path("machines.yaml").write_text(
        "- {chassis_serial: SPARE1, slot: 0, tray_index: 0, rack: r9, gpus: 4}\n"
        "- {chassis_serial: SPARE1, slot: 1, tray_index: 1, rack: r9, gpus: 4}\n"
    )
    desk.run("machine import machines.yaml")
    desk.run("machine import machines.yaml")
    desk.run("machine force-delete --machine spare1-1")
    switch.fabric.create("left-over", [gpu.guid for gpu in list(switch.fabric.gpus.values())[:2]])
    desk.until("partition show", lambda said: "left-over" in said)
    desk.run("partition show")
    desk.run(f"domain pause {domain} --reason 'looking first'")
    desk.run(f"partition release --domain {domain} --name left-over --reason 'of the old service'")
    desk.run(f"plan {domain} --to plan.json")
    desk.run("apply plan.json")
    desk.until("domain show", lambda said: "blocked:" in said)
    desk.run("domain show")
    desk.run(f"domain resume {domain}")
    desk.until("partition show", lambda said: "left-over" not in said)
    desk.run("apply plan.json")
    desk.run(f"plan {domain}")
    desk.run(f"tray cordon {machine} --reason 'fan is loud'")
    desk.run(f"tray drain {machine} --reason 'fan is replaced'")
    desk.run(f"tray uncordon {machine}")
    Path("password").write_text("hush\n")
    desk.run("credential add nmx-m --username root --password-file password")
    desk.run("credential delete nmx-m")
    desk.run("logical-partition create -n job -t nobody")
    desk.run("logical-partition show")
    desk.run(f"browse --chassis-serial {serial} --operation gpu-info --gpu-uid {min(switch.fabric.gpus)}")
    desk.run("instance update-nvlink-config -i none --config '{}'")
    desk.lines += ["# with the certificate of a viewer", ""]
    desk.sit_down("viewer")
    desk.run("endpoint show")
    desk.run(f"endpoint delete --chassis-serial {serial}")
    assert desk.transcript() == external_file("transcripts/admin-day.txt")


def test_the_credential_lies_in_the_secret_provider(desk, ground):
    desk.monkeypatch.setattr("sys.stdin", io.StringIO())
    with pytest.raises(Refused, match="must not be empty"):
        desk.quietly("credential add nmx-m --username root")
    Path("password").write_text("hush")
    desk.quietly("credential add nmx-m --username root --password-file password")
    assert (ground.directory / "secrets/nmxm/default/auth/password").read_text() == "hush"


def test_json_and_yaml_say_the_same(desk):
    (serial,) = {gpu.chassis_serial for gpu in desk.switch.fabric.gpus.values()}
    if serial not in desk.quietly("endpoint show"):
        desk.quietly(f"endpoint create --chassis-serial {serial} --endpoint {desk.switch.url}")
    desk.until("machine list", lambda said: desk.switch.fabric.domain in said)
    plan = f"plan {desk.switch.fabric.domain}"
    for command in ("endpoint show", "machine list", "partition show", "logical-partition show", plan):
        # A new observation between two commands changes its time: compare between equal answers.
        for _attempt in range(20):
            before = json.loads(desk.quietly(f"{command} -o json"))
            as_yaml = yaml.safe_load(desk.quietly(f"{command} -o yaml"))
            if json.loads(desk.quietly(f"{command} -o json")) == before:
                break
        assert as_yaml == before
    assert before["observation"]["domain"] == desk.switch.fabric.domain


def test_a_site_that_is_not_there_is_told(desk):
    desk.monkeypatch.setenv("RACKLOOM_ADMIN_SITE", "localhost:1")
    with pytest.raises(Retry, match="did not answer"):
        desk.quietly("endpoint show")


def test_missing_certificates_are_told_with_the_option(desk):
    desk.monkeypatch.delenv("RACKLOOM_ADMIN_KEY")
    with pytest.raises(Refused, match="--key") as refused:
        desk.quietly("endpoint show")
    assert "RACKLOOM_ADMIN_KEY" in refused.value.nearest_fix


@pytest.mark.parametrize(
    "content", ["", "[]x", '[{"chassis_serial": "S"}]', '[{"chassis_serial": "S", "slots": 1}]']
)
def test_a_bad_file_of_machines_is_refused_before_anything_is_asked(desk, content):
    Path("bad.json").write_text(content)
    with pytest.raises(Refused, match=r"bad\.json is not a list of machines"):
        desk.quietly("machine import bad.json")
