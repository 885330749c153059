"""TLS: the controller's certificate is checked, and the client shows its own on request."""

import asyncio
from typing import Any

import pytest

from rackloom.carve.fabric.controller import FabricUnavailable, TlsMaterial
from rackloom.carve.fabric.nmxc.driver import NmxcDriver
from rackloom.carve.fabric.nmxc.protocol import parse_endpoint
from rackloom.errors import Refused
from rackloom.lab.switches.fabric import SimulatedFabric
from rackloom.lab.switches.servers import NmxcServer, NmxcServerTls


def observe(fabric: SimulatedFabric, server_tls: NmxcServerTls, client_tls: TlsMaterial | None) -> str:
    async def scenario() -> str:
        async with NmxcServer(fabric, tls=server_tls) as server:
            driver = NmxcDriver(server.url, clock=lambda: 0.0, tls=client_tls)
            try:
                return (await driver.observe()).domain
            finally:
                await driver.close()

    return asyncio.run(scenario())


def test_a_controller_is_trusted_by_its_authority(fabric: SimulatedFabric, authority: Any) -> None:
    pem = authority.issue("127.0.0.1")
    tls = NmxcServerTls(certificate=pem.certificate, key=pem.key)
    assert observe(fabric, tls, TlsMaterial(ca=authority.certificate)) == fabric.domain


def test_mutual_tls(fabric: SimulatedFabric, authority: Any) -> None:
    pem, mine = authority.issue("127.0.0.1"), authority.issue("rackloom")
    tls = NmxcServerTls(certificate=pem.certificate, key=pem.key, client_ca=authority.certificate)
    client = TlsMaterial(ca=authority.certificate, certificate=mine.certificate, key=mine.key)
    assert observe(fabric, tls, client) == fabric.domain


def test_a_certificate_for_another_name_needs_the_authority_override(
    fabric: SimulatedFabric, authority: Any
) -> None:
    pem = authority.issue("nmx-c.rack-7")
    tls = NmxcServerTls(certificate=pem.certificate, key=pem.key)
    with pytest.raises(FabricUnavailable):
        observe(fabric, tls, TlsMaterial(ca=authority.certificate))
    named = TlsMaterial(ca=authority.certificate, authority="nmx-c.rack-7")
    assert observe(fabric, tls, named) == fabric.domain


def test_strangers_are_not_trusted_by_either_side(
    fabric: SimulatedFabric, authority: Any, other_authority: Any
) -> None:
    pem, theirs = authority.issue("127.0.0.1"), other_authority.issue("rackloom")
    tls = NmxcServerTls(certificate=pem.certificate, key=pem.key, client_ca=authority.certificate)
    for client in (
        None,
        TlsMaterial(ca=other_authority.certificate),
        TlsMaterial(ca=authority.certificate),
        TlsMaterial(ca=authority.certificate, certificate=theirs.certificate, key=theirs.key),
    ):
        with pytest.raises(FabricUnavailable):
            observe(fabric, tls, client)


def test_half_of_a_client_identity_is_refused(authority: Any) -> None:
    with pytest.raises(Refused, match="go together"):
        TlsMaterial(certificate=authority.issue("rackloom").certificate)


@pytest.mark.parametrize(
    "url",
    [
        "",
        "switch:9370",
        "ftp://switch",
        "http://",
        "https://switch:port",
        "http://switch/path",
        "http://u@switch",
    ],
)
def test_an_address_that_is_none_is_refused_with_the_form_it_should_have(url: str) -> None:
    with pytest.raises(Refused, match="is not the address of a switch controller") as refusal:
        NmxcDriver(url, clock=lambda: 0.0)
    assert "9370" in str(refusal.value.nearest_fix)


@pytest.mark.parametrize(
    ("url", "target"),
    [
        ("http://switch", (False, "switch:9370")),
        ("https://10.0.0.1:443/", (True, "10.0.0.1:443")),
        ("https://[fe80::1]", (True, "[fe80::1]:9370")),
    ],
)
def test_where_an_address_leads(url: str, target: tuple[bool, str]) -> None:
    assert parse_endpoint(url) == target


def test_tls_files_are_not_silently_ignored_over_plaintext(authority: Any) -> None:
    with pytest.raises(Refused, match="plaintext"):
        NmxcDriver("http://switch", clock=lambda: 0.0, tls=TlsMaterial(ca=authority.certificate))
