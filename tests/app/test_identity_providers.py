"""The configurations of examples/identity, with tokens as Keycloak, Entra ID and Dex issue them.

The providers are real https servers with a private authority, and the site is a whole `rackloom serve`.
"""

import asyncio
import gc
import re
import ssl
from contextlib import asynccontextmanager
from pathlib import Path

import httpx2
import pytest
from tests.app.identity_provider import Provider, served
from tests.waiting import PATIENCE, until

from rackloom.app.config import load_config
from rackloom.app.site.service import site_service
from rackloom.web import live

pytestmark = pytest.mark.filterwarnings(
    r"ignore:Exception ignored in.{2}<(socket\.socket|function _Selector\w*Transport\.__del__) "
    ":pytest.PytestUnraisableExceptionWarning"
)
"""Keys are read every 50 ms until the end. If the opening of a connection is cancelled, the connection is
left to the collector (asyncio of Python 3.11)."""
EXAMPLES = Path(__file__).parents[2] / "examples" / "identity"
TID = "9f2c1a34-0c5e-4f0e-9d5b-2f6f1f6a7b10"
CLIENT = "6e74172b-be56-4843-9ff4-e66a39bb12e3"
OPERATORS = "0bb5d1a8-7c0f-4a0e-9a51-6fd7ff2c3e11"
KEYCLOAK = {
    "auth_time": 1,
    "jti": "onrtac:0b3ce2a5-61f0-4a0c-8f0b-2f5a4d2b8a11",
    "aud": ["rackloom", "account"],
    "sub": "5c5a1f0e-2b7e-4a41-9f2a-0f6f0f5c7a21",
    "typ": "Bearer",
    "azp": "rackloom-cli",
    "sid": "8a1cf4c9-55a5-4f7a-9f3e-4c9f2a0b6d31",
    "acr": "1",
    "allowed-origins": ["https://console.example.com"],
    "realm_access": {"roles": ["default-roles-site", "offline_access", "uma_authorization"]},
    "resource_access": {"account": {"roles": ["manage-account", "view-profile"]}},
    "scope": "openid email profile organization",
    "email_verified": True,
    "organization": ["demo"],
    "name": "Ada Lovelace",
    "groups": ["/acme/TENANT_ADMIN", "/acme/TENANT_ADMIN/deep", "/everybody"],
    "preferred_username": "ada",
    "given_name": "Ada",
    "family_name": "Lovelace",
    "email": "ada@example.com",
}
ENTRA_USER = {
    "aud": CLIENT,
    "nbf": 1,
    "aio": "AXQAi/8TAAAA",
    "azp": "f3a1c2de-8a0b-4f3a-9d9b-1f6f2a7b3c41",
    "azpacr": "0",
    "groups": [OPERATORS],
    "name": "Ada Lovelace",
    "oid": "aa0c1b2d-1111-4222-8333-94b5c6d7e8f9",
    "preferred_username": "ada@example.com",
    "rh": "0.AAAA",
    "roles": ["Rackloom.TenantAdmin"],
    "scp": "access_as_user",
    "sid": "005e1f2a-0000-4000-8000-000000000000",
    "sub": "HKZpfaHyWadeOouYlitjrI-KffTm222X5rrV3xDqfKQ",
    "tid": TID,
    "uti": "fqiBqXLPj0eQa82S-IYFAA",
    "ver": "2.0",
}
ENTRA_PROGRAM = {
    "aud": f"api://{CLIENT}",
    "nbf": 1,
    "aio": "E2ZgYAAA",
    "azp": "f3a1c2de-8a0b-4f3a-9d9b-1f6f2a7b3c41",
    "azpacr": "1",
    "idtyp": "app",
    "oid": "bb0c1b2d-1111-4222-8333-94b5c6d7e8f9",
    "rh": "0.AAAA",
    "roles": ["Rackloom.Viewer"],
    "sub": "bb0c1b2d-1111-4222-8333-94b5c6d7e8f9",
    "tid": TID,
    "uti": "fqiBqXLPj0eQa82S-IYFAB",
    "ver": "2.0",
}
DEX = {
    "sub": "CgNhZGESBGxkYXA",
    "aud": "rackloom",
    "at_hash": "mKzYvYIJ5tAt9DJ4Xw5Ruw",
    "email": "ada@example.com",
    "email_verified": True,
    "groups": ["rackloom:acme:PROVIDER_ADMIN", "rackloom:a:b:TENANT_ADMIN", "staff"],
    "name": "Ada Lovelace",
    "preferred_username": "ada",
    "federated_claims": {"connector_id": "ldap", "user_id": "ada"},
}


def without(claims, *names):
    return {name: value for name, value in claims.items() if name not in names}


class Served:
    """A site that trusts the three, and its clients."""

    def __init__(self, ground, running):
        self._base = f"https://localhost:{running.rest_port}/v2/org/"
        self._metrics = f"http://127.0.0.1:{running.metrics_port}"
        self.http = httpx2.AsyncClient(verify=ssl.create_default_context(cafile=ground.ca))

    async def get(self, token, org, path):
        headers = {"Authorization": f"Bearer {token}"}
        return await self.http.get(f"{self._base}{org}/nico/{path}", headers=headers)

    async def status(self, token, org, path):
        return (await self.get(token, org, path)).status_code

    async def opened(self, token, org="acme"):
        """Which are open: reads as the tenant, reads as the provider, and changes as the provider."""
        tenant = await self.get(token, org, "vpc")
        provider = await self.get(token, org, "operator-step")
        headers = {"Authorization": f"Bearer {token}"}
        change = await self.http.post(
            f"{self._base}{org}/nico/nvlink-nmxc-endpoint", json={}, headers=headers
        )
        answers = (tenant, provider, change)
        # 400: the role was enough, but the organisation provides nothing, or the body is empty.
        assert {answer.status_code for answer in answers} <= {200, 400, 403}, [
            answer.text for answer in answers
        ]
        return tuple(answer.status_code != 403 for answer in answers)

    async def page(self, name):
        return (await self.http.get(f"{self._metrics}/{name}")).text

    async def shows(self, name, text):
        return text in await self.page(name)


@asynccontextmanager
async def serving(ground, authority, **providers):
    """A site with the configurations of examples/identity that use `providers`."""
    async with served(ground.directory, authority, *providers.values()) as url:
        text = ground.config().read_text()
        for name in providers:
            example = (EXAMPLES / f"{name}.toml").read_text()
            example = re.sub(r"https://(keycloak|login|dex)\.[a-z.]+\.com", url, example)
            text += example.replace('"/etc/rackloom/idp/ca.crt"', f'"{ground.ca}"\nrefresh = "50ms"')
        ground.directory.joinpath("site.toml").write_text(text)
        async with site_service(load_config(ground.directory / "site.toml")) as running:
            site = Served(ground, running)
            async with site.http:
                yield site
    # Here, so that no later test is blamed for a connection that was being opened.
    gc.collect()


def test_the_three_examples_with_tokens_in_the_formats_of_their_providers(ground, authority):
    keycloak = Provider("/realms/site", "ES256")
    entra, dex = Provider(f"/{TID}/v2.0"), Provider("/dex")

    async def scenario():
        async with serving(ground, authority, keycloak=keycloak, entra=entra, dex=dex) as site:
            people = keycloak.token(KEYCLOAK)
            assert await site.opened(people) == (True, False, False)
            assert await site.opened(people, "demo") == (False, False, False)
            client_roles = {"resource_access": {"rackloom": {"roles": ["rack-viewer"]}}}
            assert await site.opened(keycloak.token(KEYCLOAK | client_roles), "demo") == (False, True, False)
            described = {"organization": {"demo": {"id": "1c2d"}}, "groups": []}
            described |= {"resource_access": {"rackloom": {"roles": ["tenant-admin"]}}}
            assert await site.opened(keycloak.token(KEYCLOAK | described), "demo") == (True, False, False)

            assert await site.opened(entra.token(ENTRA_USER)) == (True, True, True)
            assert await site.opened(entra.token(ENTRA_USER | {"groups": []})) == (True, False, False)
            assert await site.opened(entra.token(ENTRA_PROGRAM)) == (False, True, False)
            sources = {"_claim_sources": {"src1": {"endpoint": "https://graph.windows.net/..."}}}
            overage = {"_claim_names": {"groups": "src1"}} | sources
            answer = await site.get(entra.token(without(ENTRA_USER, "groups") | overage), "acme", "vpc")
            assert (answer.status_code, "does not list the groups" in answer.text) == (403, True)

            assert await site.opened(dex.token(DEX)) == (False, True, True)
            for org in ("a", "b", "a:b"):
                assert await site.opened(dex.token(DEX), org) == (False, False, False)
            wrong = {
                "an ID token": keycloak.token(KEYCLOAK | {"typ": "ID"}),
                "another client": keycloak.token(KEYCLOAK | {"azp": "game"}),
                "another service": keycloak.token(KEYCLOAK | {"aud": "account"}),
                "another directory": entra.token(ENTRA_USER | {"tid": "another"}),
                "version 1": entra.token(ENTRA_USER | {"ver": "1.0"}),
                "nobody": entra.token(without(ENTRA_USER, "oid")),
                "another connector": dex.token(DEX | {"federated_claims": {"connector_id": "github"}}),
                "no connector": dex.token(without(DEX, "federated_claims")),
                "an address of another": dex.token(DEX | {"email_verified": False}),
                "another issuer's key": dex.token(DEX | {"iss": keycloak.url}),
            }
            for name, token in wrong.items():
                assert await site.status(token, "acme", "vpc") == 401, name

    asyncio.run(scenario())


def test_steps_are_recorded_with_the_issuer_of_their_subject(ground, authority):
    dex = Provider("/dex")

    async def scenario():
        async with serving(ground, authority, dex=dex) as site:
            token = dex.token(DEX)
            endpoint = {"chassisSerial": "C1", "endpoint": "https://localhost:1"}
            url, headers = f"{site._base}acme/nico/nvlink-nmxc-endpoint", {"Authorization": f"Bearer {token}"}
            assert (await site.http.post(url, json=endpoint, headers=headers)).status_code == 201
            assert (await site.http.delete(f"{url}/C1", headers=headers)).status_code < 300
            steps = (await site.get(token, "acme", "operator-step")).text
            assert f"{dex.url}#ada@example.com" in steps

    asyncio.run(scenario())


def test_a_program_of_a_served_site_calls_with_a_key_of_its_own(ground, authority):
    dex = Provider("/dex")

    async def scenario():
        async with serving(ground, authority, dex=dex) as site:
            person = {"Authorization": f"Bearer {dex.token(DEX)}"}
            url = f"{site._base}acme/nico"

            async def make(path, body=None):
                answer = await site.http.post(f"{url}/{path}", json=body, headers=person)
                assert answer.status_code == 201, answer.text
                return answer.json()

            await make(
                "role", {"name": "auditor", "side": "PROVIDER", "permissions": ["operator-steps:read"]}
            )
            account = await make("service-account", {"name": "audit", "roles": ["auditor"]})
            key = (await make(f"service-account/{account['id']}/key"))["key"]
            assert account["createdBy"] == f"{dex.url}#ada@example.com"
            assert await site.opened(key) == (False, True, False)
            await site.http.delete(f"{url}/service-account/{account['id']}", headers=person)
            assert await site.status(key, "acme", "operator-step") == 401
            # A group of the directory may name a custom role too.
            member = dex.token(DEX | {"groups": ["rackloom:acme:auditor"]})
            assert await site.opened(member) == (False, True, False)

    asyncio.run(scenario())


def test_a_site_starts_without_its_provider_and_recovers(monkeypatch, ground, authority):
    monkeypatch.setattr(live, "RECORD_SECONDS", 0.1)
    dex = Provider("/dex")
    dex.is_down = True

    async def scenario():
        async with serving(ground, authority, dex=dex) as site:
            answer = await site.get(dex.token(DEX), "acme", "operator-step")
            assert (answer.status_code, answer.headers["retry-after"]) == (503, "10")
            assert answer.json()["message"] == "The keys of the issuer of the token could not be read yet"
            listed = f"issuer {dex.url}: unknown: keys were read never: "
            await until(lambda: site.shows("readyz", listed), "the issuer is listed")
            assert f'nico_nvlink_issuer_keys_age_seconds{{issuer="{dex.url}"}} +Inf' in await site.page(
                "metrics"
            )
            dex.is_down = False
            async with asyncio.timeout(PATIENCE):
                while await site.status(dex.token(DEX), "acme", "operator-step") != 200:
                    await asyncio.sleep(0.02)

            async def is_ready():
                return await site.page("readyz") == "ok\n"

            await until(is_ready, "no finding stops the service")

    asyncio.run(scenario())
