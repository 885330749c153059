"""`rackloom admin import nico` against a whole stand-in of NICo and a whole site over the same racks."""

import importlib.util
import shlex
from pathlib import Path

import msgspec
import pytest
import structlog
from anyio.from_thread import start_blocking_portal
from tests.cli.nico_stand_in import NicoStandIn, ServedSite, empty_fabric, read_only

from rackloom.app.config import load_config
from rackloom.app.site.service import site_service
from rackloom.carve.admin import operator_pb2 as ours
from rackloom.cli.admin import app
from rackloom.core.takeover.records import SiteReading, TakeoverPlan

pytestmark = pytest.mark.slow
KEEP = {"site": 'default_partition = "keep"'}


def ground_class():
    path = Path(__file__).parents[1] / "app" / "conftest.py"
    spec = importlib.util.spec_from_file_location("ground_of_a_site", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.Ground


class Takeover:
    """Both control planes over the same racks, and an operator's terminal."""

    def __init__(self, nico, site, switches, directory, capsys):
        self.nico, self.site, self.switches = nico, site, switches
        self.directory, self.capsys = directory, capsys
        self.writes = []
        for switch in switches:
            switch.fabric.on_change(self.writes.append)

    @property
    def fabric(self):
        return self.switches[0].fabric

    def admin(self, line):
        self.capsys.readouterr()
        code = app(shlex.split(line), result_action="return_value") or 0
        return code, self.capsys.readouterr().out

    def token(self, org, role="TENANT_ADMIN"):
        file = self.directory / f"{org}-{role}.token"
        file.write_text(self.nico.ground.token(org, role) + "\n")
        return file

    def plan(self, name="plan.json", orgs=("acme", "globex"), more=""):
        chosen = " ".join(f"--org {org}={self.token(org)}" for org in orgs)
        provider = (
            f"--provider-org acme={self.token('acme', 'PROVIDER_VIEWER')}"
            if "--no-provider" not in more
            else ""
        )
        more = more.replace("--no-provider", "")
        _, output = self.admin(
            f"import nico plan --url {self.nico.url} --nico-ca {self.nico.ground.ca} {chosen} {provider}"
            f" --out {name} {more}"
        )
        return msgspec.json.decode(Path(name).read_bytes(), type=TakeoverPlan), output

    def admin_options(self):
        at = self.nico.connection
        options = {"": at.site, "-ca": at.ca, "-cert": at.cert, "-key": at.key}
        return " ".join(f"--nico-admin{name} {value}" for name, value in options.items())

    def reading(self):
        text = self.site.rpc("ShowTakeoverSite", ours.TakeoverSiteRequest()).reading
        return msgspec.json.decode(text, type=SiteReading)


@pytest.fixture(scope="module")
def running(tmp_path_factory, authority):
    """Two services over two racks; the records of the stand-in and its partitions."""
    structlog.configure(
        processors=[structlog.processors.JSONRenderer()],
        wrapper_class=structlog.BoundLogger,
        logger_factory=structlog.ReturnLoggerFactory(),
    )
    ground = ground_class()
    theirs = ground(tmp_path_factory.mktemp("nico"), authority)
    mine = ground(tmp_path_factory.mktemp("site"), authority)
    with (
        start_blocking_portal() as portal,
        portal.wrap_async_context_manager(mine.racks(2)) as switches,
        portal.wrap_async_context_manager(
            site_service(load_config(read_only(theirs.config(**KEEP))))
        ) as nico_service,
    ):
        for switch in switches:
            portal.call(lambda switch=switch: as_coroutine(empty_fabric, switch.fabric))
        nico = NicoStandIn(theirs, nico_service)
        nico.furnish(switches)
        nico.portal = portal
        with portal.wrap_async_context_manager(site_service(load_config(mine.config(**KEEP)))) as service:
            site = ServedSite(mine, service)
            for switch in switches:
                site.register(switch)
            yield nico, site, switches
    structlog.reset_defaults()


async def as_coroutine(fn, *args):
    return fn(*args)


@pytest.fixture(scope="module")
def partitions(running):
    """acme has two equal partitions, globex an unequal one; one was made by hand."""
    nico, site, switches = running
    fabric = switches[0].fabric
    made = {
        "train": nico.tenant("acme", "train", 2),
        "serve": nico.tenant("globex", "serve", 1),
        "odd": nico.tenant("globex", "odd", 1),
    }
    names = {}
    where = {}
    for name, org in (("train", "acme"), ("serve", "globex"), ("odd", "globex")):
        first = nico.guids(org, made[name])[0]
        where[name] = next(switch.fabric for switch in switches if first in switch.fabric.gpus)
    for name, org, without in (("train", "acme", 0), ("serve", "globex", 0), ("odd", "globex", 1)):
        names[name] = nico.make_partition(where[name], org, made[name], without=without)
    used = {guid for switch in switches for p in switch.fabric.partitions.values() for guid in p.guids}
    free = [guid for guid in sorted(fabric.gpus) if guid not in used]
    fabric.create("made-by-hand", free[-2:])
    nico.until_ready("acme", "train-0", "train-1")
    nico.until_ready("globex", "serve-0")
    site.until_listed("made-by-hand", *names.values())
    return made, names, where


@pytest.fixture
def takeover(running, partitions, tmp_path, monkeypatch, capsys):
    nico, site, switches = running
    monkeypatch.chdir(tmp_path)
    at = site.connection
    for key, value in (("SITE", at.site), ("CA", at.ca), ("CERT", at.cert), ("KEY", at.key)):
        monkeypatch.setenv(f"RACKLOOM_ADMIN_{key}", str(value))
    return Takeover(nico, site, switches, tmp_path, capsys)


def test_a_whole_takeover_and_its_rollback(takeover, partitions):
    _made, names, _where = partitions
    before = takeover.reading()
    plan, text = takeover.plan(more=takeover.admin_options())
    assert sorted(step.name for step in plan.steps if step.__struct_config__.tag == "adopt") == sorted(
        [names["train"], names["serve"]]
    )
    left = {entry.name: entry.reason for entry in plan.left_alone}
    assert "1 GPUs" in left[names["odd"]]
    assert "missing in it that imported instances want" in left[names["odd"]]
    assert "NICo did not name it" in left["made-by-hand"]
    assert takeover.reading() == before

    code, output = takeover.admin("import nico apply plan.json")
    assert "stays paused, because the site would change the fabric: create-partition" in output
    assert code == 1
    takeover.site.until_ready("acme", "train-0", "train-1")
    takeover.site.until_ready("globex", "serve-0")
    for org in ("acme", "globex"):
        kept = ("id", "name", "vpcId", "instanceTypeId", "labels", "machineId", "tenantId")
        shown = [
            sorted(tuple(str(entry[key]) for key in kept) for entry in side.rest("GET", "instance", org=org))
            for side in (takeover.nico, takeover.site)
        ]
        assert shown[0] == shown[1]
        for path in ("nvlink-logical-partition", "vpc", "allocation"):
            ids = [
                {entry["id"] for entry in side.rest("GET", path, org=org)}
                for side in (takeover.nico, takeover.site)
            ]
            assert ids[0] == ids[1]
    interfaces = [
        {
            (entry["id"], entry["gpuGuid"])
            for entry in side.rest("GET", "nvlink-interface?pageSize=100", org="acme")
        }
        for side in (takeover.nico, takeover.site)
    ]
    assert interfaces[0] == interfaces[1]

    again, text = takeover.plan("again.json", more=takeover.admin_options())
    assert again.steps == ()
    assert "nothing to do" in text

    code, output = takeover.admin("import nico rollback plan.json")
    assert takeover.reading() == before
    code, output = takeover.admin("import nico rollback plan.json")
    assert takeover.reading() == before
    assert takeover.writes == []
