"""The rack map of a running site: the tokens of REST, the records' own picture, changes as they come."""

import asyncio
import re
import time

import httpx2
import pytest
from tests import waiting
from tests.app.embedded_site import embedded_site

from rackloom.app.home import Home

OURS = {"Sec-Fetch-Site": "same-origin"}


def site_of(tmp_path, scenario):
    async def running():
        home = Home(tmp_path / "home")
        async with (
            embedded_site(home, port=0, racks=1, profile="gb200-nvl72") as site,
            httpx2.AsyncClient(base_url=site.url, timeout=60) as client,
        ):
            return await scenario(site, client)

    return asyncio.run(asyncio.wait_for(running(), 120))


def token(site, org, role):
    return site.issuer.mint(org, [role], time.time(), 600)


async def sign_in(client, org, key):
    answer = await client.post("/map/login", data={"org": org, "token": key}, headers=OURS)
    return answer.status_code


async def carve(client, org, key):
    """Two trays of the rack for a tenant, in a new partition."""
    base, auth = f"/v2/org/{org}/nico", {"Authorization": f"Bearer {key}"}
    site = (await client.get(f"{base}/site", headers=auth)).json()[0]["id"]
    body = {"name": f"{org}-train", "siteId": site}
    partition = (await client.post(f"{base}/nvlink-logical-partition", json=body, headers=auth)).json()["id"]
    vpc = body | {"nvLinkLogicalPartitionId": partition}
    vpc_id = (await client.post(f"{base}/vpc", json=vpc, headers=auth)).json()["id"]
    kind = (await client.get(f"{base}/instance/type", headers=auth)).json()[0]["id"]
    batch = {"namePrefix": "job", "count": 2, "vpcId": vpc_id, "instanceTypeId": kind}
    answer = await client.post(f"{base}/instance/batch", json=batch, headers=auth)
    assert answer.status_code == 201, answer.text


async def until(stream, words):
    """Read a stream of changes until it contains `words`."""
    async for line in stream.aiter_lines():
        if words in line:
            return True
    return False


@pytest.mark.slow
def test_the_map_stands_beside_rest_and_follows_what_is_ordered_there(tmp_path):
    async def scenario(site, client):
        provider, tenant = token(site, "demo", "PROVIDER_VIEWER"), token(site, "acme", "TENANT_ADMIN")
        assert await sign_in(client, "demo", provider) == 303
        page = (await client.get("/")).text
        async with client.stream("GET", "/map/live") as stream:
            await carve(client, "acme", tenant)
            seen = await until(stream, "acme-train")
        return page, seen, (await client.get("/v2/org/demo/nico/site")).status_code

    page, seen, without_header = site_of(tmp_path, scenario)
    assert page.count('role="gridcell"') == 72
    assert "18 of 18 trays free" in page
    assert seen
    assert without_header == 401, "the map's cookie opens nothing of REST"


@pytest.mark.slow
def test_a_tenant_is_told_nothing_of_another(tmp_path):
    async def scenario(site, client):
        await carve(client, "acme", token(site, "acme", "TENANT_ADMIN"))
        assert await sign_in(client, "blue", token(site, "blue", "TENANT_ADMIN")) == 303
        others = []

        async def is_read() -> bool:
            """A page shows the newest reading, and that may have begun before the order."""
            others.append((await client.get("/?by=tenant")).text)
            return len(re.findall('class="o[ "]', others[-1])) > 1

        await waiting.until(is_read, "the map has read what was ordered")
        assert await sign_in(client, "acme", token(site, "acme", "TENANT_ADMIN")) == 303
        assert not any("acme" in other for other in others)
        return others[-1], (await client.get("/?by=tenant")).text

    other, own = site_of(tmp_path, scenario)
    assert len(re.findall('class="o[ "]', other)) == 8 + 1, "eight GPUs in use, and the legend"
    # A note follows the tenant while its partition is being made.
    assert len(re.findall(': acme[,"]', own)) == 8


def test_tokens_that_rest_refuses_are_refused_here(tmp_path):
    async def scenario(site, client):
        good = token(site, "acme", "TENANT_ADMIN")
        old = site.issuer.mint("acme", ["TENANT_ADMIN"], time.time() - 900, 600)
        return [await sign_in(client, *who) for who in (("blue", good), ("acme", old), ("acme", good[:-2]))]

    assert site_of(tmp_path, scenario) == [401, 401, 401]
