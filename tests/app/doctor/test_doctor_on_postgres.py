"""The doctor beside `rackloom serve` on PostgreSQL: the same findings from a shared database."""

import asyncio
import json
import time

import grpc
import grpc.aio
import pytest
import sqlalchemy as sa
from tests.carve.conftest import postgres_server, postgres_template, postgres_url  # noqa: F401

from rackloom.app.config import load_config
from rackloom.app.doctor import DoctorSources, diagnose, read_snapshot
from rackloom.app.site.service import site_service
from rackloom.app.snapshot.readers import PostgresRecordReader
from rackloom.carve.admin import forge_pb2 as pb
from rackloom.carve.admin import forge_pb2_grpc
from rackloom.carve.store.schema import machine
from rackloom.cli.doctor import doctor
from rackloom.core.diagnosis.catalogue import Check
from rackloom.core.diagnosis.examination import examine
from rackloom.core.diagnosis.findings import CheckState
from rackloom.core.diagnosis.snapshot import Layer
from rackloom.errors import Refused
from rackloom.lab.switches.fabric import FabricPartition

PATIENCE = 60.0
INTERVAL = 30.0
"""Of the site's configuration."""


@pytest.fixture
def config(ground, postgres_url):  # noqa: F811
    file = ground.config()
    sqlite = f'sqlite = "{ground.directory / "home"}"'
    file.write_text(file.read_text().replace(sqlite, f'postgresql = "{postgres_url}"'))
    assert load_config(file).database.postgresql == postgres_url
    return file


async def register(ground, port, switch):
    crt, key = ground.files["admin"]
    own = grpc.ssl_channel_credentials(ground.ca.read_bytes(), key.read_bytes(), crt.read_bytes())
    (serial,) = {gpu.chassis_serial for gpu in switch.fabric.gpus.values()}
    async with grpc.aio.secure_channel(f"localhost:{port}", own) as channel:
        endpoint = pb.NvlinkNmxcEndpoint(chassis_serial=serial, endpoint=switch.url)
        await forge_pb2_grpc.ForgeStub(channel).CreateNvlinkNmxcEndpoint(endpoint)


async def until_found(config, *checks):
    """The findings, once they are of these checks and 18 machines are seen."""
    async with asyncio.timeout(PATIENCE):
        while True:
            seen = await asyncio.to_thread(diagnose, DoctorSources(config=config))
            if len(seen.snapshot.machines) == 18 and [finding.check for finding in seen.findings] == list(
                checks
            ):
                return seen.findings
            await asyncio.sleep(0.1)


def by_hand(switch):
    """An unmanaged partition of one free GPU."""
    guid = min(switch.fabric.gpus)
    switch.fabric.put(FabricPartition(id=9, name="by-hand", guids=(guid,), multicast_groups=0))


@pytest.mark.slow
def test_a_site_on_postgresql(ground, config, capsys):
    async def play():
        async with ground.racks() as (switch,):
            async with site_service(load_config(config)) as site:
                await register(ground, site.admin_port, switch)
                await until_found(config)
                by_hand(switch)
                (found,) = await until_found(config, Check.PARTITION_OWNED)
                assert found.subject == "partition by-hand"
                assert switch.fabric.domain in " ".join(found.where)
                switch.fabric.delete(9)
                await until_found(config)
            return switch.fabric.domain

    domain = asyncio.run(play())
    capsys.readouterr()
    code = doctor(config=config, output="json")
    assert json.loads(capsys.readouterr().out) == {"ok": True, "simulated": False, "findings": []}
    assert code == 0
    asyncio.run(_ages(config, domain))


async def _ages(config, domain):
    """That a replica elsewhere has stopped shows only in the age of its observations."""
    (seen,) = (await read_snapshot(DoctorSources(config=config), time.time())).domains
    soon, late = seen.observed_at + 2 * INTERVAL, seen.observed_at + 10 * INTERVAL
    assert examine(await read_snapshot(DoctorSources(config=config), soon)) == ()
    (found,) = examine(await read_snapshot(DoctorSources(config=config), late))
    assert (found.check, found.state) == (Check.CONTROLLER, CheckState.UNKNOWN)
    assert found.subject == f"domain {domain}"
    assert found.since == seen.observed_at


@pytest.mark.slow
def test_a_reader_that_was_kept_from_running_reads_again(postgres_url):  # noqa: F811
    """The server ends transactions that nothing happens in: 2 s by the settings of our connections."""
    pauses = [2.5]

    def slow_once(conn):
        conn.execute(sa.select(machine))
        if pauses:
            time.sleep(pauses.pop())
        return conn.execute(sa.text("SELECT 1")).scalar_one()

    async def read():
        reader = PostgresRecordReader(postgres_url)
        try:
            return await reader.read(slow_once)
        finally:
            await reader.close()

    assert asyncio.run(read()) == 1
    assert pauses == []


@pytest.mark.slow
def test_it_never_writes(config, postgres_url):  # noqa: F811
    async def write():
        reader = PostgresRecordReader(postgres_url)
        try:
            await reader.read(lambda conn: conn.execute(sa.delete(machine)))
        finally:
            await reader.close()

    with pytest.raises(Refused, match="read-only"):
        asyncio.run(write())


def test_a_server_that_does_not_answer_is_unknown_and_the_rest_is_read(config, postgres_url, tmp_path):  # noqa: F811
    config.write_text(config.read_text().replace(postgres_url, "postgresql://u:hush@127.0.0.1:9/site"))
    (tmp_path / "transfers").mkdir()
    seen = diagnose(DoctorSources(config=config, transfers=tmp_path / "transfers"))
    assert seen.snapshot.layer(Layer.TRANSFER).unknown_since is None
    (found,) = seen.findings
    assert (found.check, found.subject, found.state) == (
        Check.LAYER,
        "layer fabric and site",
        CheckState.UNKNOWN,
    )
    assert "the database cannot be read" in found.message
    assert (
        found.fix == f"pg_isready --host 127.0.0.1 --port 9  # the server that [database] names in {config}"
    )
    assert "hush" not in repr(seen)


@pytest.mark.parametrize(
    ("database", "text"), [("postgres", 'relation ".*" does not exist'), ("nowhere", "nowhere.*not exist")]
)
def test_a_database_that_is_no_sites_is_refused(config, postgres_url, database, text):  # noqa: F811
    other = sa.make_url(postgres_url).set(database=database).render_as_string(hide_password=False)
    config.write_text(config.read_text().replace(postgres_url, other))
    with pytest.raises(Refused, match=text) as reported:
        diagnose(DoctorSources(config=config))
    assert "start the site once" in reported.value.nearest_fix
    assert "sqlalche.me" not in reported.value.reason
