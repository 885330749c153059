"""Signing in to the map at an identity provider: a whole site over https, and a provider that is strict.

The provider is a stand-in on loopback (`identity_provider.SigningInProvider`). `test_real_provider.py` has a
real one.
"""

import asyncio
import gc
import html
import re
import ssl
from contextlib import AsyncExitStack, asynccontextmanager

import httpx2
import pytest
from tests.app.identity_provider import SigningInProvider, served
from tests.ports import reserved_ports
from tests.waiting import PATIENCE

from rackloom.app.config import load_config
from rackloom.app.site.service import site_service

OURS = {"Sec-Fetch-Site": "same-origin"}
ANY_ORGANISATION = 'organisations = ["*"]'
ISSUER = """
[[auth.issuers]]
issuer = "{url}"
audience = "rackloom"
ca_file = "{ca}"
{lines}
[auth.issuers.sign_in]
client_id = "rack-map"
title = "Our <Login>"
{sign_in}
"""
PERSON = {"sub": "ada", "orgs": {"acme": ["PROVIDER_ADMIN"]}}


class Browser:
    """An http client that follows the same links as a browser: redirects, and pages that lead on."""

    def __init__(self, http: httpx2.AsyncClient, site: str) -> None:
        self.http = http
        self.site = site

    async def get(self, address: str) -> httpx2.Response:
        for _ in range(8):
            answer = await self.http.get(address)
            if answer.is_redirect:
                address = str(answer.url.join(answer.headers["location"]))
            elif led := re.search(r'http-equiv="refresh" content="0; url=([^"]*)"', answer.text):
                address = str(answer.url.join(html.unescape(led[1])))
            else:
                return answer
        raise AssertionError("it goes round in circles")

    async def begin(self, **form: str) -> httpx2.Response:
        """Press the button of the first provider."""
        return await self.http.post(
            f"{self.site}/map/login/begin", data={"provider": "0", **form}, headers=OURS
        )

    async def sign_in(self, **form: str) -> httpx2.Response:
        """Press the button and follow."""
        page = await self.begin(**form)
        led = re.search(r'http-equiv="refresh" content="0; url=([^"]*)"', page.text)
        return page if led is None else await self.get(html.unescape(led[1]))


@asynccontextmanager
async def signing_in_at(ground, issuer, port, *, sign_in="", issuer_lines=ANY_ORGANISATION):
    """A browser before a site at `port` whose people sign in at `issuer`."""
    address = f"https://localhost:{port}"
    text = ground.config().read_text().replace('listen = "127.0.0.1:0"', f'listen = "127.0.0.1:{port}"', 1)
    text += f'\n[map]\naddress = "{address}"\n'
    text += ISSUER.format(url=issuer, ca=ground.ca, lines=issuer_lines, sign_in=sign_in)
    ground.directory.joinpath("site.toml").write_text(text)
    async with site_service(load_config(ground.directory / "site.toml")):
        verify = ssl.create_default_context(cafile=ground.ca)
        async with httpx2.AsyncClient(verify=verify, timeout=PATIENCE) as http:
            yield Browser(http, address)
    # Here, so that no later test is blamed for a connection that was being opened.
    gc.collect()


@asynccontextmanager
async def signing_in(ground, authority, *, secret=None, marks=None, **lines):
    """A site with a strict provider: the provider, and a browser."""
    with reserved_ports() as port:
        redirect = f"https://localhost:{port}/map/login/back"
        provider = SigningInProvider("/idp", redirect=redirect, client_secret=secret)
        provider.claims = dict(PERSON)
        for name, value in (marks or {}).items():
            setattr(provider, name, value)
        async with AsyncExitStack() as stack:
            await stack.enter_async_context(served(ground.directory, authority, provider))
            site = signing_in_at(ground, provider.url, port, **lines)
            yield provider, await stack.enter_async_context(site)


def run(scenario):
    asyncio.run(asyncio.wait_for(scenario(), 120))


def test_a_person_comes_back_with_the_page_that_was_wanted(ground, authority):
    async def scenario():
        async with signing_in(ground, authority) as (_, browser):
            door = await browser.get(f"{browser.site}/?by=health")
            assert "Sign in with Our &lt;Login&gt;" in door.text
            (target,) = set(re.findall(r'name="to" value="([^"]*)"', door.text))
            page = await browser.sign_in(org="acme", to=html.unescape(target))
            assert (page.status_code, str(page.url)) == (200, f"{browser.site}/?by=health")
            names = {cookie.name for cookie in browser.http.cookies.jar}
            assert names == {"rackloom-map"}, "the cookie of the sign-in is gone"

    run(scenario)


@pytest.mark.parametrize("in_body", [False, True])
def test_the_client_has_a_secret(ground, authority, in_body):
    file = ground.directory / "client-secret"
    file.write_text("a&b c:ü\n")
    line = f'client_secret_file = "{file}"'

    async def scenario():
        given = {"secret": "a&b c:ü", "sign_in": line, "marks": {"sends_in_body": in_body}}
        async with signing_in(ground, authority, **given) as (provider, browser):
            assert (await browser.sign_in(org="acme")).url.path == "/"
            provider.client_secret = "another"
            refused = await browser.sign_in(org="acme")
            assert refused.status_code == 403
            assert "invalid_client" in refused.text

    run(scenario)


def test_an_id_token_may_be_the_one_that_counts(ground, authority):
    async def scenario():
        lines = 'audiences = ["rack-map"]\norganisations = ["acme"]'
        async with signing_in(ground, authority, sign_in='token = "id_token"', issuer_lines=lines) as (
            _,
            browser,
        ):
            door = await browser.get(f"{browser.site}/")
            begin = door.text.partition("<details>")[0]
            assert 'name="org"' not in begin, "the issuer has one organisation: nobody is asked"
            assert (await browser.sign_in()).url.path == "/"

    run(scenario)


def test_who_has_no_role_or_was_refused_reads_why(ground, authority):
    async def scenario():
        async with signing_in(ground, authority) as (provider, browser):
            stranger = await browser.sign_in(org="blue")
            assert (stranger.status_code, "gives no role in blue" in stranger.text) == (403, True)
            provider.refusal = "access_denied"
            refused = await browser.sign_in(org="acme")
            assert "access_denied &lt;b&gt;not today" in refused.text
            assert refused.status_code == 403
            nobody = await browser.sign_in(org="")
            assert (nobody.status_code, "Name your organisation" in nobody.text) == (400, True)

    run(scenario)


def test_nobody_finishes_what_another_browser_began(ground, authority):
    async def scenario():
        async with signing_in(ground, authority) as (provider, browser):
            page = await browser.begin(org="acme")
            there = html.unescape(re.search(r"url=([^\"]*)\"", page.text)[1])
            back = (await browser.http.get(there)).headers["location"]
            browser.http.cookies.clear()
            stolen = await browser.http.get(back)
            assert (stolen.status_code, "not begun in this browser" in stolen.text) == (400, True)
            await browser.begin(org="acme")
            mixed = await browser.http.get(back)
            assert mixed.status_code == 400, "the state is that of another sign-in"
            assert "rackloom-map" not in browser.http.cookies

            provider.nonce = "of another"
            replayed = await browser.sign_in(org="acme")
            assert "belongs to another sign-in" in replayed.text
            provider.nonce = None

            page = await browser.begin(org="acme")
            there = html.unescape(re.search(r"url=([^\"]*)\"", page.text)[1])
            back = (await browser.http.get(there)).headers["location"]
            other = back.replace(html.escape(provider.url), "").replace("iss=", "iss=x")
            answered = await browser.http.get(other)
            assert "another issuer answered" in answered.text
            again = await browser.http.get(back)
            assert again.status_code == 400, "one attempt for each cookie"

            foreign = await browser.http.post(
                f"{browser.site}/map/login/begin",
                data={"provider": "0", "org": "acme"},
                headers={"Sec-Fetch-Site": "cross-site"},
            )
            assert foreign.status_code == 403

    run(scenario)


@pytest.mark.parametrize(
    "target", ["//evil.test/", "https://evil.test/", "/\\evil.test", "/map/logout", "/map/login", "/v2/org"]
)
def test_a_sign_in_leads_to_the_map_and_nowhere_else(ground, authority, target):
    async def scenario():
        async with signing_in(ground, authority) as (_, browser):
            assert str((await browser.sign_in(org="acme", to=target)).url) == f"{browser.site}/"

    run(scenario)


def test_a_provider_that_is_away_is_named_and_soon_asked_again(ground, authority):
    async def scenario():
        async with signing_in(ground, authority, marks={"is_down": True}) as (provider, browser):
            asked = len(provider.fetched)
            for _ in range(3):
                page = await browser.begin(org="acme")
                assert page.status_code == 503
                assert "Our &lt;Login&gt; cannot be asked now" in page.text
            assert len(provider.fetched) == asked + 1, "one attempt in ten seconds"
            token = await browser.http.post(
                f"{browser.site}/map/login",
                data={"org": "acme", "token": ground.token(role="PROVIDER_ADMIN")},
                headers=OURS,
            )
            assert token.status_code == 303, "a token signs in all the same"

    run(scenario)


def test_an_authority_that_cannot_be_read_is_a_reason_and_no_fault_of_the_service(ground, authority):
    async def scenario():
        async with signing_in(ground, authority) as (_, browser):
            ground.ca.unlink()
            page = await browser.begin(org="acme")
            assert (page.status_code, "cannot be asked now" in page.text) == (503, True)

    run(scenario)


@pytest.mark.parametrize("address", ["https://[", "https://exa mple.test/token", "https://"])
def test_an_address_that_is_none_is_a_reason_too(ground, authority, address):
    async def scenario():
        marks = {"document": {"token_endpoint": address}}
        async with signing_in(ground, authority, marks=marks) as (_, browser):
            page = await browser.sign_in(org="acme")
            assert (page.status_code, "did not sign you in" in page.text) == (403, True)

    run(scenario)
