"""Addresses, tokens and authorities: what is refused, and that no token is shown anywhere."""

import logging
import ssl
from pathlib import Path
from typing import Any

import httpx2
import pytest
from tests.proxies import with_dead_proxies

from rackloom.app.home import Home
from rackloom.app.home_connection import home_connection
from rackloom.client import Client, Connection, NotDecided, RetryPolicy, SignIn, operations
from rackloom.errors import Refused

SECRET = "eyJhbGciOi.s3cr3t.t0k3n"
URL = "https://site.example"


@pytest.mark.parametrize(
    ("url", "base"),
    [
        (URL, "https://site.example/v2/org/a%20b/nico/"),
        (f"{URL}:8443/", "https://site.example:8443/v2/org/a%20b/nico/"),
        (f"{URL}/below", "https://site.example/below/v2/org/a%20b/nico/"),
        (f"{URL}/v2/org/demo/nico", "https://site.example/v2/org/a%20b/nico/"),
        ("http://127.0.0.1:8080", "http://127.0.0.1:8080/v2/org/a%20b/nico/"),
        ("http://[::1]:8080", "http://[::1]:8080/v2/org/a%20b/nico/"),
    ],
)
def test_addresses(url: str, base: str) -> None:
    assert Connection(url=url, org="a b", token="t").base_url() == base


@pytest.mark.parametrize(
    "url",
    ["site.example", "ftp://site.example", "https://", "https://me:word@site.example", "http://site.example"],
)
def test_addresses_that_are_refused(url: str) -> None:
    with pytest.raises(Refused):
        Connection(url=url, org="demo", token="t").base_url()


@pytest.mark.parametrize(
    ("url", "proxied"),
    [
        ("http://127.0.0.1:8080", False),
        ("http://[::1]:8080", False),
        ("https://localhost", False),
        ("https://site.example", True),
    ],
)
def test_a_proxy_is_asked_for_other_hosts_only(url: str, proxied: bool, monkeypatch: Any) -> None:
    with_dead_proxies(monkeypatch)
    with Client(Connection(url=url, org="demo", token="abc")) as client:
        assert bool(client._http._mounts) is proxied


@pytest.mark.parametrize("org", ["", ".", ".."])
def test_organisations_that_are_refused(org: str) -> None:
    with pytest.raises(Refused, match="cannot be an organisation"):
        Connection(url=URL, org=org, token="t").base_url()


def test_a_file_and_a_function_are_asked_for_each_request(tmp_path: Path) -> None:
    seen: list[str] = []

    def answer(request: httpx2.Request) -> httpx2.Response:
        seen.append(request.headers["Authorization"])
        return httpx2.Response(200, json=[])

    file = tmp_path / "token"
    tokens = iter(("c", "d"))
    for token in (file, lambda: next(tokens)):
        client = Client(Connection(url=URL, org="demo", token=token), transport=httpx2.MockTransport(answer))
        for content in ("a\n", "b\n"):
            file.write_text(content)
            client.call(operations.get_machine_gpu_stats())
    assert seen == ["Bearer a", "Bearer b", "Bearer c", "Bearer d"]


@pytest.mark.parametrize("token", ["", "Bearer abc", "a\nb", "\x00", "ü"])
def test_what_is_no_token(token: str) -> None:
    with pytest.raises(Refused, match="is no token") as caught:
        Connection(url=URL, org="demo", token=token).authorization()
    assert not token or token not in str(caught.value)


def test_a_file_that_is_missing(tmp_path: Path) -> None:
    with pytest.raises(Refused, match=r"none cannot be read: No such file"):
        Connection(url=URL, org="demo", token=tmp_path / "none").authorization()


def test_no_token_is_shown(caplog: Any) -> None:
    """Not in the log, at any level, nor in errors or representations."""
    caplog.set_level(logging.DEBUG)
    answers = iter((httpx2.Response(401, json={"message": "no"}), httpx2.ReadError("lost")))

    def answer(_: httpx2.Request) -> httpx2.Response:
        given = next(answers)
        if isinstance(given, Exception):
            raise given
        return given

    connection = Connection(url=URL, org="demo", token=SECRET)
    client = Client(connection, transport=httpx2.MockTransport(answer), retries=RetryPolicy(attempts=1))
    texts = [repr(connection), repr(client), f"{client.__dict__}"]
    for error in (SignIn, NotDecided):
        with pytest.raises(error) as caught:
            client.call(operations.get_machine_gpu_stats())
        texts += [str(caught.value), repr(caught.value), f"{caught.getrepr(showlocals=False)}"]
    assert SECRET not in "".join(texts) + caplog.text


def test_no_token_is_logged_on_a_socket(site: Any, caplog: Any) -> None:
    caplog.set_level(logging.DEBUG)
    connection = home_connection(Home(site.home), org="demo", roles=["TENANT_ADMIN"])
    sent: list[str] = []

    def remembered() -> str:
        assert callable(connection.token)
        sent.append(connection.token())
        return sent[-1]

    with Client(Connection(url=connection.url, org="demo", token=remembered)) as client:
        client.call(operations.get_metadata())
    assert "httpx2" in {record.name for record in caplog.records}
    assert sent
    assert all(token not in caplog.text for token in sent)


def test_an_authority_of_ones_own(tmp_path: Path) -> None:
    with pytest.raises(Refused, match="No such file"):
        Connection(url=URL, org="demo", token="t", ca=tmp_path / "none").tls()
    file = tmp_path / "empty.pem"
    file.write_text("")
    with pytest.raises(Refused, match="has no certificate"):
        Connection(url=URL, org="demo", token="t", ca=file).tls()
    context = ssl.create_default_context()
    assert Connection(url=URL, org="demo", token="t", ca=context).tls() is context


def test_a_home_that_does_not_run(tmp_path: Path) -> None:
    with pytest.raises(Refused, match="no site lives in"):
        home_connection(Home(tmp_path), org="demo", roles=["TENANT_ADMIN"])
    home = Home(tmp_path)
    home.keys.mkdir()
    with pytest.raises(Refused, match="does not run") as caught:
        home_connection(home, org="demo", roles=["TENANT_ADMIN"])
    assert caught.value.nearest_fix == f"start it with: rackloom up --home {tmp_path}"
