"""Shared parts of all tests: steady hypothesis settings, and certificates of made-up authorities."""

import datetime as dt
import ipaddress
import os
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID
from hypothesis import HealthCheck, settings
from tests.ports import reserved_network

pytest_plugins = ["tests.real_time"]

# No property fails for being slow on a busy machine. With CI set, the same code gets the same examples, so
# that only a change's own effect can fail it. Other runs look for new examples, and for more of them.
IN_CI = "CI" in os.environ
settings.register_profile(
    "steady",
    deadline=None,
    derandomize=IN_CI,
    max_examples=60 if IN_CI else 100,
    suppress_health_check=[HealthCheck.too_slow],
    print_blob=True,
)
settings.register_profile("quick", settings.get_profile("steady"), max_examples=10, stateful_step_count=10)
settings.load_profile("steady")


def pytest_xdist_auto_num_workers() -> int:
    """With `-n auto`, three workers for two cores: tests wait for a third of their time."""
    return (os.cpu_count() or 1) * 3 // 2 or 1


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """A test on PostgreSQL is slow: its server takes seconds to start, and each write a round trip."""
    for item in items:
        parameters = getattr(getattr(item, "callspec", None), "params", {})
        if "postgresql" in parameters.values() or "postgres_server" in getattr(item, "fixturenames", ()):
            item.add_marker(pytest.mark.slow)


START = dt.datetime(2020, 1, 1, tzinfo=dt.UTC)
LOOPBACK = ipaddress.ip_address("127.0.0.1")
END = dt.datetime(2100, 1, 1, tzinfo=dt.UTC)


class Pem(msgspec.Struct, frozen=True):
    """A certificate and its key."""

    certificate: bytes
    key: bytes

    def save(self, directory: Path, name: str) -> tuple[Path, Path]:
        files = directory / f"{name}.crt", directory / f"{name}.key"
        for file, content in zip(files, (self.certificate, self.key), strict=True):
            file.write_bytes(content)
        return files


class Authority:
    """Signs certificates. Two authorities do not trust each other."""

    def __init__(self, name: str) -> None:
        self._key = ec.generate_private_key(ec.SECP256R1())
        self._name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
        certificate = self._builder(self._name, self._key).add_extension(
            x509.BasicConstraints(ca=True, path_length=None), critical=True
        )
        self.certificate = certificate.sign(self._key, hashes.SHA256()).public_bytes(
            serialization.Encoding.PEM
        )

    def issue(self, name: str) -> Pem:
        key = ec.generate_private_key(ec.SECP256R1())
        subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
        names = x509.SubjectAlternativeName([x509.DNSName("localhost"), x509.IPAddress(LOOPBACK)])
        signed = self._builder(subject, key).add_extension(names, critical=False)
        return Pem(
            signed.sign(self._key, hashes.SHA256()).public_bytes(serialization.Encoding.PEM),
            key.private_bytes(
                serialization.Encoding.PEM,
                serialization.PrivateFormat.PKCS8,
                serialization.NoEncryption(),
            ),
        )

    def _builder(self, subject: x509.Name, key: ec.EllipticCurvePrivateKey) -> x509.CertificateBuilder:
        builder = x509.CertificateBuilder().subject_name(subject).issuer_name(self._name)
        builder = builder.public_key(key.public_key()).serial_number(x509.random_serial_number())
        return builder.not_valid_before(START).not_valid_after(END)


UMASK = os.umask(0o022)
os.umask(UMASK)


@pytest.fixture(autouse=True)
def umask() -> Iterator[Callable[[int], int]]:
    """Sets the umask for a test, which begins with that of the session.

    The umask of another test does not reach this one, nor does that of a fixture of a module or of the
    session, because a site's own process makes files private to their owner.
    """
    os.umask(UMASK)
    yield os.umask
    os.umask(UMASK)


@pytest.fixture(scope="session")
def authority() -> Authority:
    return Authority("test authority")


@pytest.fixture(scope="session")
def make_authority() -> Callable[[str], Authority]:
    return Authority


@pytest.fixture
def loopback_network() -> Iterator[str]:
    """The network whose loopback addresses simulated machines can have, as 127.8 for those from 127.8.0.0."""
    with reserved_network() as network:
        yield network
