"""A controller's address names the protocol, and for an NMX-M perhaps the domain."""

import pytest

from rackloom.carve.fabric.controller import (
    ControllerKind,
    controller_kind,
    parse_controller_url,
    url_of_kind,
)
from rackloom.errors import Refused

DOMAIN = "00000000-0000-4000-8000-00000000d001"
C, M = ControllerKind.NMX_C, ControllerKind.NMX_M


@pytest.mark.parametrize(
    ("url", "read"),
    [
        ("https://switch", (C, "https", "switch", None, None)),
        ("https://switch:9370/", (C, "https", "switch", 9370, None)),
        ("http://[::1]:9", (C, "http", "[::1]", 9, None)),
        ("https://nmx-m/nmx/v1", (M, "https", "nmx-m", None, None)),
        ("https://nmx-m:8443/nmx/v1/", (M, "https", "nmx-m", 8443, None)),
        (f"https://nmx-m/nmx/v1?domain={DOMAIN.upper()}", (M, "https", "nmx-m", None, DOMAIN)),
    ],
)
def test_an_address_says_which_protocol_is_spoken(url: str, read: tuple[object, ...]) -> None:
    address = parse_controller_url(url)
    assert (address.kind, address.scheme, address.host, address.port, address.domain) == read
    assert controller_kind(url) is read[0]


@pytest.mark.parametrize(
    "url",
    [
        "",
        "switch",
        "ftp://switch",
        "https://",
        "https://[::1",
        "https://switch:0",
        "https://switch:99999",
        "https://root:hush@switch",
        "https://:hush@nmx-m/nmx/v1",
        "https://switch/other",
        "https://switch?x=1",
        f"https://switch?domain={DOMAIN}",
        "https://nmx-m/nmx/v1?domain=one",
        "https://nmx-m/nmx/v1?x",
        f"https://nmx-m/nmx/v1?domain={DOMAIN}&x=1",
        "https://nmx-m/nmx/v1#part",
        "https://nmx-m/nmx/v2",
        "https://swi\tch",
        "https://switch\n",
        "\x1fhttps://switch",
        "https://swi tch",
        "https://\u202eswitch",
    ],
)
def test_what_is_no_address_is_refused_with_the_right_forms(url: str) -> None:
    with pytest.raises(Refused) as refusal:
        parse_controller_url(url)
    assert "/nmx/v1" in (refusal.value.nearest_fix or "")
    assert controller_kind(url) is C


def test_a_kind_makes_the_address_whole() -> None:
    assert url_of_kind("https://nmx-m:1/", M) == "https://nmx-m:1/nmx/v1"
    assert url_of_kind("https://nmx-m/nmx/v1", M) == "https://nmx-m/nmx/v1"
    assert url_of_kind("https://switch", C) == "https://switch"
    with pytest.raises(Refused, match="not the address of an NMX-C"):
        url_of_kind("https://nmx-m/nmx/v1", C)
