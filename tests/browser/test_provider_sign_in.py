"""Signing in at an identity provider in a browser, which has special rules for requests from another site.

Map and provider are different sites to the browser: `localhost` and `127.0.0.1`. The provider sends every
user straight back. tests/app/test_map_sign_in.py tests its requests and responses.
"""

import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, urlencode, urlsplit

import pytest
from tests.browser import axe
from tests.browser.conftest import OPERATOR, PATIENCE_MS, serving
from tests.browser.test_rack_map import story
from tests.ports import reserved_ports
from tests.web.stand_ins import doorman

from rackloom.web.provider_sign_in import ProviderSignIn, TokenAnswer

pytestmark = pytest.mark.slow


class SendsBack(BaseHTTPRequestHandler):
    """A provider that accepts every user."""

    def do_GET(self) -> None:
        asked = {name: values[0] for name, values in parse_qs(urlsplit(self.path).query).items()}
        back = urlencode({"code": "code", "state": asked["state"]})
        self.send_response(302)
        self.send_header("Location", f"{asked['redirect_uri']}?{back}")
        self.end_headers()

    def log_message(self, *_: Any) -> None:
        pass


class Provider:
    """The provider's settings that the map needs."""

    issuer = "https://provider.test"
    client_id = "map"
    scopes = ("openid",)

    def __init__(self, title: str, url: str, organisation: str | None = None) -> None:
        self.title = title
        self.organisation = organisation
        self._url = url

    async def authorization_endpoint(self) -> str:
        return f"{self._url}/authorize"

    async def exchange(self, code: str, verifier: str, redirect: str) -> TokenAnswer:
        return TokenAnswer(OPERATOR)


@pytest.fixture
def provider_url() -> Iterator[str]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), SendsBack)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{server.server_address[1]}"
    server.shutdown()
    thread.join()
    server.server_close()


@pytest.mark.parametrize("script", [True, False])
def test_a_button_leads_to_the_provider_and_back_to_the_wanted_page(
    chromium: Any, provider_url: str, pictures_folder: Any, script: bool
) -> None:
    with reserved_ports() as port:
        address = f"http://localhost:{port}"
        known = [Provider("Racks login", provider_url), Provider("Partner login", provider_url, "provider")]
        with serving(story(), port, ProviderSignIn(known, address, doorman)):
            context = chromium.new_context(java_script_enabled=script)
            try:
                page = context.new_page()
                page.set_default_timeout(PATIENCE_MS)
                page.goto(f"{address}/?by=health")
                if script:
                    page.screenshot(path=pictures_folder / "sign-in-at-a-provider.png")
                    assert axe.violations(page) == []
                page.fill("input[name=org] >> nth=0", "provider")
                page.get_by_role("button", name="Sign in with Racks login").click()
                page.wait_for_url(f"{address}/?by=health")
                page.wait_for_selector("#summary")
                kept = {cookie["name"]: cookie for cookie in context.cookies()}
                assert kept.keys() == {"rackloom-map"}
                assert kept["rackloom-map"]["sameSite"] == "Strict"
            finally:
                context.close()
