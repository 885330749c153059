"""A small simulated domain on a loopback socket, a driver to it, and certificates."""

import asyncio
import datetime as dt
import ipaddress
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import Any

import msgspec
import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from rackloom.carve.fabric.nmxc.driver import NmxcDriver
from rackloom.lab.switches.fabric import FabricGpu, SimulatedFabric
from rackloom.lab.switches.servers import NmxcServer

DOMAIN = "00000000-0000-4000-8000-00000000d001"
GUIDS = tuple(0xDB48_8CB1_7978_4800 + number for number in range(8))

Rig = Callable[..., AbstractAsyncContextManager[tuple[NmxcServer, NmxcDriver]]]


def small_fabric(domain: str = DOMAIN) -> SimulatedFabric:
    """Two trays of four GPUs."""
    gpus = (
        FabricGpu(
            guid=guid,
            chassis_serial="CHASSIS-A",
            chassis_id=0,
            slot=number // 4,
            host_id=number // 4 + 1,
            tray_index=number // 4,
            module_id=number % 4 + 1,
        )
        for number, guid in enumerate(GUIDS)
    )
    return SimulatedFabric(domain, gpus)


@pytest.fixture
def fabric() -> SimulatedFabric:
    return small_fabric()


@pytest.fixture
def rig(fabric: SimulatedFabric) -> Rig:
    """Opens a server of `fabric` and a driver to it, and closes both."""

    @asynccontextmanager
    async def opened(**options: Any) -> AsyncIterator[tuple[NmxcServer, NmxcDriver]]:
        async with NmxcServer(fabric) as server:
            driver = NmxcDriver(server.url, clock=lambda: 12.5, **options)
            try:
                async with asyncio.timeout(120):
                    yield server, driver
            finally:
                await driver.close()

    return opened


class Pem(msgspec.Struct, frozen=True):
    certificate: bytes
    key: bytes


class Authority:
    """A certificate authority made for one test run."""

    def __init__(self) -> None:
        self._key = ec.generate_private_key(ec.SECP256R1())
        self._name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "test authority")])
        constraints = x509.BasicConstraints(ca=True, path_length=None)
        builder = self._builder(self._name, self._key).add_extension(constraints, critical=True)
        self.certificate = builder.sign(self._key, hashes.SHA256()).public_bytes(serialization.Encoding.PEM)

    def issue(self, name: str) -> Pem:
        """A certificate for a DNS name or an IP address."""
        key = ec.generate_private_key(ec.SECP256R1())
        subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
        alternative = x509.SubjectAlternativeName([_general_name(name)])
        builder = self._builder(subject, key).add_extension(alternative, critical=False)
        return Pem(
            builder.sign(self._key, hashes.SHA256()).public_bytes(serialization.Encoding.PEM),
            key.private_bytes(
                serialization.Encoding.PEM,
                serialization.PrivateFormat.PKCS8,
                serialization.NoEncryption(),
            ),
        )

    def _builder(self, subject: x509.Name, key: ec.EllipticCurvePrivateKey) -> x509.CertificateBuilder:
        now = dt.datetime.now(dt.UTC)
        return (
            x509.CertificateBuilder()
            .subject_name(subject)
            .issuer_name(self._name)
            .public_key(key.public_key())
            .serial_number(x509.random_serial_number())
            .not_valid_before(now - dt.timedelta(hours=1))
            .not_valid_after(now + dt.timedelta(hours=1))
        )


def _general_name(name: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(name))
    except ValueError:
        return x509.DNSName(name)


@pytest.fixture(scope="session")
def authority() -> Authority:
    return Authority()


@pytest.fixture
def other_authority() -> Authority:
    return Authority()
