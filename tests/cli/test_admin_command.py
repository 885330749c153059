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
    """A service with one rack that is not registered yet: its switch and its admin port."""
    # The service logs in the same process. Its lines must not mix with the command's.
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


class Terminal:
    """An operator's terminal: runs commands, and keeps its input and output."""

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
            output = self.capsys.readouterr().out
        except Refused as refused:
            fix = f"\n  fix: {refused.nearest_fix}" if refused.nearest_fix else ""
            code, output = 1, f"rackloom: {refused.reason}{fix}\n"
        self.lines += [
            f"$ rackloom admin {line}",
            output.rstrip("\n"),
            *([f"[exit {code}]"] if code else []),
            "",
        ]
        return output

    def until(self, line, holds):
        def look():
            output = self.quietly(line)
            return output if holds(output) else None

        return until_seen(look, line)

    def transcript(self):
        """The transcript, with generated ids replaced by numbered ones, and times by a word."""
        numbers = {self.switch.fabric.domain: self.switch.fabric.domain}
        text = UUID.sub(
            lambda found: numbers.setdefault(found[0], f"00000000-0000-4000-8000-{len(numbers):012}"),
            "\n".join(self.lines),
        )
        text = text.replace(self.switch.url, "https://switch:9370")
        return re.sub(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ", "TIME", text) + "\n"


@pytest.fixture
def terminal(ground, running, monkeypatch, capsys):
    return Terminal(ground, *running, monkeypatch, capsys)


@pytest.mark.slow
def test_an_operators_day(terminal):
    switch = terminal.switch
    (serial,) = {gpu.chassis_serial for gpu in switch.fabric.gpus.values()}
    domain = switch.fabric.domain
    machine = f"{serial}-0".lower()
    terminal.run("endpoint show")
    terminal.run(f"endpoint create --chassis-serial {serial} --endpoint {switch.url}")
    terminal.run(f"endpoint create --chassis-serial {serial} --endpoint {switch.url}")
    terminal.run("endpoint create --chassis-serial S2 --endpoint http://10.0.0.1")
    terminal.run("endpoint create --chassis-serial S3 --endpoint https://10.0.0.1 --kind nmx-m")
    terminal.run("endpoint update --chassis-serial S3 --endpoint https://10.0.0.2/nmx/v1 --kind nmx-c")
    terminal.run("endpoint show")
    terminal.run("endpoint delete --chassis-serial S3")
    terminal.until("machine list", lambda output: domain in output)
    terminal.until("partition show", lambda output: "Default" not in output)
    terminal.run("machine list")
    terminal.run(f"machine nvlink-info show {machine} -o table")
    terminal.run(f"machine nvlink-info populate {machine} --update-db")
    terminal.run("machine nvlink-info show nowhere")
    Path("machines.yaml").write_text(
        "- {chassis_serial: SPARE1, slot: 0, tray_index: 0, rack: r9, gpus: 4}\n"
        "- {chassis_serial: SPARE1, slot: 1, tray_index: 1, rack: r9, gpus: 4}\n"
    )
    terminal.run("machine import machines.yaml")
    terminal.run("machine import machines.yaml")
    terminal.run("machine force-delete --machine spare1-1")
    switch.fabric.create("left-over", [gpu.guid for gpu in list(switch.fabric.gpus.values())[:2]])
    terminal.until("partition show", lambda output: "left-over" in output)
    terminal.run("partition show")
    terminal.run(f"domain pause {domain} --reason 'looking first'")
    terminal.run(f"partition release --domain {domain} --name left-over --reason 'of the old service'")
    terminal.run(f"plan {domain} --to plan.json")
    terminal.run("apply plan.json")
    terminal.until("domain show", lambda output: "blocked:" in output)
    terminal.run("domain show")
    terminal.run(f"domain resume {domain}")
    terminal.until("partition show", lambda output: "left-over" not in output)
    terminal.run("apply plan.json")
    terminal.run(f"plan {domain}")
    tray = [gpu.guid for gpu in switch.fabric.gpus.values() if gpu.slot == 3]
    switch.fabric.create("by-hand", tray)
    terminal.until("partition show", lambda output: "by-hand" in output)
    terminal.run("domain show")
    terminal.run(f"partition adopt --domain {domain} --name by-hand --reason 'was there before'")
    owner = "--tenant acme --vpc lab --logical-partition-name training"
    terminal.run(f"partition adopt --domain {domain} --name by-hand {owner} --reason 'was there before'")
    terminal.run("logical-partition show")
    terminal.run("partition show")
    terminal.run(f"plan {domain}")
    terminal.run(f"tray cordon {machine} --reason 'fan is loud'")
    terminal.run(f"tray drain '{serial} slot 0' --reason 'fan is replaced'")
    terminal.run(f"tray uncordon {serial}/slot-0/gpu-2")
    free = "--tenant acme --machine spare1-0"
    terminal.run(f"reservation create {free} --until 2020-01-01 --reason 'a planned job'")
    terminal.run("reservation list")
    terminal.run("reservation delete none --reason 'it was cancelled'")
    Path("password").write_text("hush\n")
    terminal.run("credential add nmx-m --username root --password-file password")
    terminal.run("credential delete nmx-m")
    terminal.run("logical-partition create -n job -t nobody")
    terminal.run("logical-partition show")
    terminal.run(f"browse --chassis-serial {serial} --operation gpu-info --gpu-uid {min(switch.fabric.gpus)}")
    terminal.run("instance update-nvlink-config -i none --config '{}'")
    terminal.lines += ["# with the certificate of a viewer", ""]
    terminal.sit_down("viewer")
    terminal.run("endpoint show")
    terminal.run(f"endpoint delete --chassis-serial {serial}")
    assert terminal.transcript() == external_file("transcripts/admin-day.txt")


def test_the_credential_lies_in_the_secret_provider(terminal, ground):
    terminal.monkeypatch.setattr("sys.stdin", io.StringIO())
    with pytest.raises(Refused, match="must not be empty"):
        terminal.quietly("credential add nmx-m --username root")
    Path("password").write_text("hush")
    terminal.quietly("credential add nmx-m --username root --password-file password")
    assert (ground.directory / "secrets/nmxm/default/auth/password").read_text() == "hush"


def test_json_and_yaml_say_the_same(terminal):
    (serial,) = {gpu.chassis_serial for gpu in terminal.switch.fabric.gpus.values()}
    if serial not in terminal.quietly("endpoint show"):
        terminal.quietly(f"endpoint create --chassis-serial {serial} --endpoint {terminal.switch.url}")
    terminal.until("machine list", lambda output: terminal.switch.fabric.domain in output)
    plan = f"plan {terminal.switch.fabric.domain}"
    for command in ("endpoint show", "machine list", "partition show", "logical-partition show", plan):
        # A new observation between two commands changes its time: compare between equal answers.
        for _attempt in range(20):
            before = json.loads(terminal.quietly(f"{command} -o json"))
            as_yaml = yaml.safe_load(terminal.quietly(f"{command} -o yaml"))
            if json.loads(terminal.quietly(f"{command} -o json")) == before:
                break
        assert as_yaml == before
    assert before["observation"]["domain"] == terminal.switch.fabric.domain


def test_the_audit_log_is_exported_as_json_lines(terminal):
    for verb in ("create", "update"):
        terminal.quietly(f"endpoint {verb} --chassis-serial AUDITED --endpoint https://10.0.0.{len(verb)}")
    terminal.quietly("endpoint delete --chassis-serial AUDITED")
    lines = [json.loads(line) for line in terminal.quietly("audit export").splitlines()]
    assert [line["id"] for line in lines] == sorted({line["id"] for line in lines})
    created, updated, deleted = (line for line in lines if line["object_id"] == "AUDITED")
    assert [each["operation"] for each in (created, updated, deleted)] == [
        f"{verb}NvlinkNmxcEndpoint" for verb in ("Create", "Update", "Delete")
    ]
    assert (created["subject"], created["source"]) == ("admin", "127.0.0.1")
    assert "10.0.0" not in json.dumps([created, updated, deleted])
    rest = [
        json.loads(line) for line in terminal.quietly(f"audit export --after {created['id']}").splitlines()
    ]
    assert rest[:2] == [updated, deleted]
    assert terminal.quietly("audit export --until 2020-01-01") == ""
    assert terminal.quietly("audit export --since 2020-01-01").count("\n") >= len(lines)


def test_a_site_that_is_not_there_is_told(terminal):
    terminal.monkeypatch.setenv("RACKLOOM_ADMIN_SITE", "localhost:1")
    with pytest.raises(Retry, match="did not answer"):
        terminal.quietly("endpoint show")


def test_missing_certificates_are_told_with_the_option(terminal):
    terminal.monkeypatch.delenv("RACKLOOM_ADMIN_KEY")
    with pytest.raises(Refused, match="--key") as refused:
        terminal.quietly("endpoint show")
    assert "RACKLOOM_ADMIN_KEY" in refused.value.nearest_fix


@pytest.mark.parametrize(
    "content", ["", "[]x", '[{"chassis_serial": "S"}]', '[{"chassis_serial": "S", "slots": 1}]']
)
def test_a_bad_file_of_machines_is_refused_before_anything_is_asked(terminal, content):
    Path("bad.json").write_text(content)
    with pytest.raises(Refused, match=r"bad\.json is not a list of machines"):
        terminal.quietly("machine import bad.json")
