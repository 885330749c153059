"""The ports that tests give to programs."""

import socket

import pytest
from tests.ports import reserved_network, reserved_ports


def test_a_server_can_listen_there_and_is_reached() -> None:
    with reserved_ports(2) as first:
        for port in (first, first + 1):
            where = ("127.0.0.1", port)
            with socket.create_server(where) as server, socket.create_connection(where):
                server.accept()[0].close()


def test_nobody_who_does_not_ask_for_it_gets_one() -> None:
    with reserved_ports() as port, socket.socket() as other, pytest.raises(OSError, match="in use"):
        other.bind(("127.0.0.1", port))


def test_two_who_want_a_network_have_one_each() -> None:
    with reserved_network() as first, reserved_network() as second:
        assert first != second
        with socket.create_server((f"{first}.9.1", 0)), socket.create_server((f"{second}.9.1", 0)):
            pass
