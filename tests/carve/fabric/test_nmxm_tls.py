"""TLS to an NMX-M: trusted certificates, client certificates and refusals."""

import asyncio
import ssl
from pathlib import Path

import pytest
from tests.lab.switches.nmxm_server import NmxmServer

from rackloom.carve.fabric.controller import FabricUnavailable, TlsMaterial
from rackloom.carve.fabric.nmxm.driver import NmxmDriver
from rackloom.carve.fabric.nmxm.protocol import NmxmLogin, client_tls_context
from rackloom.errors import Refused
from rackloom.lab.switches.fabric import SimulatedFabric


async def login() -> NmxmLogin:
    return NmxmLogin("rw-user", "simulated")


def observe(
    fabric: SimulatedFabric, files: tuple[Path, Path], material: TlsMaterial | None, name: str | None = None
) -> str:
    async def run() -> str:
        async with NmxmServer([fabric], cert=files[0], key=files[1]) as server:
            driver = NmxmDriver(
                server.url,
                login,
                clock=lambda: 0.0,
                domain=fabric.domain,
                tls=client_tls_context(material) if material else None,
                server_name=name,
            )
            try:
                async with asyncio.timeout(120):
                    return (await driver.observe()).domain
            finally:
                await driver.close()

    return asyncio.run(run())


def saved(pem, directory: Path) -> tuple[Path, Path]:
    files = directory / "nmx-m.crt", directory / "nmx-m.key"
    for file, content in zip(files, (pem.certificate, pem.key), strict=True):
        file.write_bytes(content)
    return files


@pytest.mark.slow
def test_only_a_trusted_server_gets_the_password(fabric, authority, other_authority, tmp_path) -> None:
    files = saved(authority.issue("127.0.0.1"), tmp_path)
    assert observe(fabric, files, TlsMaterial(ca=authority.certificate)) == fabric.domain
    for material in (TlsMaterial(ca=other_authority.certificate), TlsMaterial(), None):
        with pytest.raises(FabricUnavailable, match="Hello: UNAVAILABLE"):
            observe(fabric, files, material)


def test_the_name_in_the_certificate_may_be_another_than_the_address(fabric, authority, tmp_path) -> None:
    files = saved(authority.issue("nmx-m.site"), tmp_path)
    material = TlsMaterial(ca=authority.certificate, authority="nmx-m.site")
    with pytest.raises(FabricUnavailable, match="Hello: UNAVAILABLE"):
        observe(fabric, files, material)
    assert observe(fabric, files, material, name=material.authority) == fabric.domain


def test_a_client_certificate_is_shown_and_leaves_no_file(authority, tmp_path, monkeypatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    mine = authority.issue("rackloom")
    context = client_tls_context(
        TlsMaterial(ca=authority.certificate, certificate=mine.certificate, key=mine.key)
    )
    assert context.verify_mode is ssl.CERT_REQUIRED
    assert list(tmp_path.iterdir()) == []


def test_pem_that_is_none_is_refused(authority) -> None:
    mine = authority.issue("rackloom")
    for material in (
        TlsMaterial(ca=b"no certificate"),
        TlsMaterial(ca=b"\xff"),
        TlsMaterial(certificate=b"none", key=mine.key),
        TlsMaterial(certificate=mine.certificate, key=authority.issue("other").key),
    ):
        with pytest.raises(Refused, match="not usable"):
            client_tls_context(material)
