"""Certificates of switch controllers are replaced while the service runs: real TLS on loopback."""

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import aclosing, asynccontextmanager
from datetime import timedelta

import pytest
import structlog
from tests.waiting import PATIENCE

from rackloom.app.config import CertificateRotation, NvlinkConfig
from rackloom.app.site.secrets import FileSecrets
from rackloom.app.site.switches import Switches
from rackloom.carve.fabric.controller import FabricUnavailable
from rackloom.carve.inventory.endpoints import Endpoint
from rackloom.core.partitions.domain import CreatePartition
from rackloom.lab.switches.fabric import SeededNames, fabrics_of
from rackloom.lab.switches.servers import NmxcServer, NmxcServerTls
from rackloom.topology import profiles
from rackloom.topology.rack import build_site

HOUR = 3600.0


class Bench:
    """A rack's controller, the files of the service, and its clock."""

    def __init__(self, directory, fabric):
        self.directory = directory
        self.fabric = fabric
        self.now = 1_800_000_000.0
        self.server = None

    @asynccontextmanager
    async def controller(self, authority):
        """The controller shows a certificate of `authority`, and requires one. The port stays."""
        pem = authority.issue("switch")
        tls = NmxcServerTls(certificate=pem.certificate, key=pem.key, client_ca=authority.certificate)
        port = 0 if self.server is None else int(self.server.url.rpartition(":")[2])
        async with NmxcServer(self.fabric, port=port, tls=tls) as self.server:
            yield

    def keep(self, authority, name="site"):
        """The files that an operator has put into place."""
        pem = authority.issue(name)
        for file, content in (("ca", authority.certificate), ("crt", pem.certificate), ("key", pem.key)):
            (self.directory / file).write_bytes(content)

    def driver(self, **rotation):
        config = NvlinkConfig(
            enabled=True,
            allow_insecure=False,
            nmx_c_tls_ca_cert_path=self.directory / "ca",
            nmx_c_tls_client_cert_path=self.directory / "crt",
            nmx_c_tls_client_key_path=self.directory / "key",
            nmx_c_certificate_rotation=CertificateRotation(**rotation),
        )
        switches = Switches(config, FileSecrets(self.directory / "secrets"), lambda: self.now)
        serials = tuple(sorted({gpu.chassis_serial for gpu in self.fabric.gpus.values()}))
        endpoint = Endpoint(id="e", url=self.server.url, domain=None, chassis_serials=serials)
        return switches.driver_for(endpoint)


@pytest.fixture
def other_authority(make_authority):
    return make_authority("another authority")


@pytest.fixture
def bench(tmp_path):
    site = build_site(profiles.load_rack("gb200-nvl72"), 1, SeededNames("lab"))
    (fabric,) = fabrics_of(site, "lab")
    return Bench(tmp_path, fabric)


def within_patience(scenario: Callable[[], Awaitable[None]]) -> None:
    async def bounded() -> None:
        async with asyncio.timeout(PATIENCE):
            await scenario()

    asyncio.run(bounded())


def test_a_new_authority_is_taken_up_without_a_restart(bench, authority, other_authority):
    async def scenario():
        bench.keep(authority)
        async with bench.controller(authority):
            driver = bench.driver()
            before = await driver.observe()
        async with bench.controller(other_authority):
            with pytest.raises(FabricUnavailable):
                await driver.observe()
            bench.keep(other_authority)
            after = await driver.observe()
            assert (after.domain, after.facts) == (before.domain, before.facts)
            guid = min(bench.fabric.gpus)
            bench.fabric.delete(32766)
            await driver.observe()
            await driver.execute(CreatePartition(name="p", logical_partition="l", guids=(guid,)))
            await driver.close()
        assert [partition.name for partition in bench.fabric.partitions.values()] == ["p"]

    within_patience(scenario)


def test_whoever_listens_hears_through_the_new_connection(bench, authority):
    async def scenario():
        bench.keep(authority)
        async with bench.controller(authority):
            driver = bench.driver(enabled=True)
            await driver.observe()
            async with aclosing(driver.notifications()) as heard:
                await anext(heard)
                bench.keep(authority, "renewed")
                bench.now += HOUR
                await driver.observe()
                await anext(heard)
                bench.fabric.delete(32766)
                await anext(heard)
            await driver.close()

    within_patience(scenario)


def test_material_that_does_not_do_leaves_the_connection_that_works(bench, authority, other_authority):
    async def scenario():
        bench.keep(authority)
        async with bench.controller(authority):
            driver = bench.driver(enabled=True, probe_timeout=timedelta(seconds=5))
            await driver.observe()
            for spoil in (
                lambda: bench.keep(other_authority),
                lambda: (bench.directory / "crt").write_text("half of a certif"),
                lambda: (bench.directory / "key").unlink(),
            ):
                spoil()
                bench.now += HOUR
                with structlog.testing.capture_logs() as logs:
                    assert (await driver.observe()).domain == bench.fabric.domain
                assert "switch.new-material-does-not-do" in [log["event"] for log in logs]
            await driver.close()

    within_patience(scenario)


def test_without_rotation_nothing_is_read_again_while_all_is_well(bench, authority):
    async def scenario():
        bench.keep(authority)
        async with bench.controller(authority):
            driver = bench.driver()
            await driver.observe()
            for file in ("ca", "crt", "key"):
                (bench.directory / file).unlink()
            bench.now += 1000 * HOUR
            assert (await driver.observe()).domain == bench.fabric.domain
            await driver.close()

    within_patience(scenario)


def test_an_end_that_comes_near_is_warned_of(bench, authority):
    async def scenario():
        bench.keep(authority)
        async with bench.controller(authority):
            driver = bench.driver(enabled=True, rotate_before_expiry=timedelta(days=40_000))
            await driver.observe()
            bench.now += HOUR
            with structlog.testing.capture_logs() as logs:
                await driver.observe()
            (warning,) = [log for log in logs if log["event"] == "switch.certificate-expires"]
            assert warning["host"] == "127.0.0.1"
            await driver.close()

    within_patience(scenario)
