"""The pages over a real socket: admission, content, and the headers that make a browser refuse things."""

import asyncio
import html
import json
import re
from datetime import UTC, datetime
from pathlib import Path
from urllib.parse import parse_qsl, urlsplit

import httpx2
import msgspec
import pytest
from tests.web.snapshots import AT, examined, snapshot
from tests.web.stand_ins import ShownSite, doorman

from rackloom.app.listeners import serve_http
from rackloom.core.diagnosis.examination import examine
from rackloom.core.diagnosis.runbooks import runbooks
from rackloom.web import live, pages
from rackloom.web.live import LiveMap
from rackloom.web.pages import create_pages
from rackloom.web.sign_in_codes import CODE_SECONDS, MOST_CODES, SignInCodes

DASHBOARD_FILES = Path(__file__).parents[2] / "deploy/monitoring/dashboards"
OURS = {"Sec-Fetch-Site": "same-origin"}
OPERATOR = {"org": "provider", "token": "operator-token"}


def visit(scenario, reading=None, codes=None, grafana=None):
    """Run `scenario(client, site)` on the pages of a site."""

    async def served():
        site = ShownSite(reading or examined(snapshot(2, 3, ("acme", None, "blue"))))
        given = {"switch_trays": 9, "codes": codes, "grafana": grafana}
        pages = create_pages(LiveMap(site, lambda: AT), doorman, lambda: AT, **given)
        async with (
            serve_http(pages, "127.0.0.1:0") as port,
            httpx2.AsyncClient(base_url=f"http://127.0.0.1:{port}", timeout=60) as client,
        ):
            return await scenario(client, site)

    return asyncio.run(asyncio.wait_for(served(), 120))


async def sign_in(client, **who):
    answer = await client.post("/map/login", data=who or OPERATOR, headers=OURS)
    assert answer.status_code == 303, answer.text
    return answer


def test_strangers_come_to_the_door_and_learn_nothing():
    async def scenario(client, site):
        page = await client.get("/")
        others = [await client.get(path) for path in ("/map/live", "/map/gpu/r0/0/0")]
        return page, [gpu.status_code for gpu in others], site.reads

    page, others, reads = visit(scenario)
    assert (page.status_code, page.headers["location"]) == (303, "/map/login")
    assert others == [401, 401]
    assert reads == 0


def test_a_token_is_kept_where_scripts_cannot_read_it():
    async def scenario(client, _):
        return (await sign_in(client)).headers["set-cookie"]

    cookie = visit(scenario)
    assert "HttpOnly" in cookie
    assert "SameSite=strict" in cookie
    assert "Secure" not in cookie


@pytest.mark.slow
@pytest.mark.parametrize(
    "who",
    [
        {"org": "provider", "token": "wrong"},
        {"org": "other", "token": "operator-token"},
        {"org": "a;b", "token": "operator-token"},
        {"org": "provider", "token": "x" * 9000},
        {},
    ],
)
def test_a_token_that_proves_nothing_is_refused(who):
    async def scenario(client, _):
        return await client.post("/map/login", data=who, headers=OURS)

    answer = visit(scenario)
    assert answer.status_code == 401
    assert "set-cookie" not in answer.headers


@pytest.mark.slow
@pytest.mark.parametrize(
    "headers",
    [{"Sec-Fetch-Site": "cross-site"}, {"Sec-Fetch-Site": "same-site"}, {"Origin": "http://elsewhere"}, {}],
)
def test_forms_of_other_sites_are_refused(headers):
    async def scenario(client, _):
        entered = await client.post("/map/login", data=OPERATOR, headers=headers)
        left = await client.post("/map/logout", headers=headers)
        return entered, left

    for answer in visit(scenario):
        assert answer.status_code == 403
        assert "set-cookie" not in answer.headers


def test_an_older_browser_proves_its_page_by_its_origin():
    async def scenario(client, _):
        origin = str(client.base_url).rstrip("/")
        return await client.post("/map/login", data=OPERATOR, headers={"Origin": origin})

    assert visit(scenario).status_code == 303


@pytest.mark.parametrize("offers", [1, 64, 65])
def test_a_link_signs_in_until_newer_ones_displace_it(offers):
    codes = SignInCodes(lambda: AT)
    links = [codes.offer(OPERATOR["org"], OPERATOR["token"]) for _ in range(offers)]

    async def scenario(client, _):
        return await client.get(links[0]), await client.get("/")

    entered, page = visit(scenario, codes=codes)
    if offers > MOST_CODES:
        assert (entered.status_code, page.status_code) == (401, 303)
        return
    # A page with a link, not a redirect: after a redirect from another site, browsers omit a strict cookie.
    assert entered.status_code == 200
    assert 'content="0; url=/"' in entered.text
    assert OPERATOR["token"] not in entered.text
    assert page.status_code == 200


@pytest.mark.parametrize("age", [0.0, CODE_SECONDS - 1, CODE_SECONDS])
def test_a_link_ends_after_a_quarter_of_an_hour(age):
    now = [AT - age]
    codes = SignInCodes(lambda: now[0])
    link = codes.offer(OPERATOR["org"], OPERATOR["token"])
    now[0] = AT

    async def scenario(client, _):
        return await client.get(link)

    answer = visit(scenario, codes=codes)
    assert answer.status_code == (200 if age < CODE_SECONDS else 401)
    assert ("set-cookie" in answer.headers) == (age < CODE_SECONDS)


@pytest.mark.parametrize("query", ["code=", "code=x", "code=%00", "org=provider&token=operator-token"])
def test_what_is_no_code_signs_nobody_in(query):
    codes = SignInCodes(lambda: AT)
    codes.offer(OPERATOR["org"], OPERATOR["token"])

    async def scenario(client, _):
        return await client.get(f"/map/login?{query}")

    assert "set-cookie" not in visit(scenario, codes=codes).headers


def test_the_token_behind_a_link_is_verified():
    codes = SignInCodes(lambda: AT)
    link = codes.offer("provider", "a-token-that-was-withdrawn")

    async def scenario(client, _):
        return await client.get(link)

    assert visit(scenario, codes=codes).status_code == 401


def test_signing_out_ends_it():
    async def scenario(client, _):
        await sign_in(client)
        await client.post("/map/logout", headers=OURS)
        return await client.get("/")

    assert visit(scenario).headers["location"] == "/map/login"


def test_every_answer_forbids_what_is_not_ours():
    async def scenario(client, _):
        stranger = await client.get("/map/login")
        await sign_in(client)
        return [stranger, await client.get("/"), await client.get("/map/static/map.js")]

    for answer in visit(scenario):
        policy = answer.headers["content-security-policy"]
        assert "default-src 'none'" in policy
        assert "unsafe" not in policy
        assert "frame-ancestors 'none'" in policy
        assert not re.search(r"(src|href)=\"(https?:)?//", answer.text)
        assert not re.search(
            r"<script(?![^>]*\bsrc=)|<style|\son\w+=|\sstyle=", answer.text.split("</html>")[0]
        )


def test_pages_are_kept_in_no_cache():
    async def scenario(client, _):
        await sign_in(client)
        return await client.get("/")

    assert visit(scenario).headers["cache-control"] == "no-store"


def test_the_page_has_all_racks_and_a_gpu_tells_its_chain():
    async def scenario(client, _):
        await sign_in(client)
        page = (await client.get("/?by=tenant")).text
        spot = re.search(r'id="(r\w+)-(\d+)-(\d+)"', page)
        assert spot is not None
        return page, await client.get("/map/gpu/{}/{}/{}".format(*spot.groups()))

    page, gpu = visit(scenario)
    assert page.count('role="gridcell"') == 2 * 3 * 4
    assert 'aria-current="page">tenant' in page
    assert "blue-ns/blue-gpus" in gpu.text


SPOTS = (
    "r0/0/0",
    "r0/0/99999999999",
    f"r0/{'9' * 5000}/0",
    f"r0/0/{'9' * 5000}",
    "r0/x/0",
    "r0/-1/0",
    "r0/²/0",
)
"""Python converts no number of more than 4300 digits."""


def test_a_stranger_with_a_number_that_cannot_be_is_sent_to_the_door():
    async def scenario(client, _):
        return await client.get(f"/map/gpu/x/{'9' * 5000}/0")

    assert visit(scenario).status_code == 401


def test_a_gpu_that_is_gone_is_said_to_be():
    async def scenario(client, _):
        await sign_in(client)
        return [await client.get(f"/map/gpu/{spot}") for spot in SPOTS]

    for answer in visit(scenario):
        assert answer.status_code == 404
        assert "no GPU here" in answer.text


def test_a_tenant_gets_its_own_only_and_others_as_in_use():
    async def scenario(client, _):
        await sign_in(client, org="acme", token="acme-token")
        return (await client.get("/")).text

    page = visit(scenario)
    assert "acme-training" in page
    assert "blue" not in page
    assert "in use by somebody else" in page


async def events(stream, count):
    """The next `count` messages of a stream that change something: their id and their markup.

    On a busy machine, an unchanged site may be read again before the next change is shown. The message of
    that reading is empty.
    """
    found, id_, data = [], "", []
    async for line in stream.aiter_lines():
        name, _, value = line.partition(": ")
        if name == "id":
            id_ = value
        elif name == "data":
            data.append(value)
        elif not line:
            if any(data):
                found.append((id_, "\n".join(data)))
            data = []
            if len(found) == count:
                break
    return found


def parts(markup):
    return re.findall(r'<hx-partial hx-target="#([\w-]+)"', markup)


def position(page):
    found = re.search(r"after=([\w.]+)", page)
    assert found is not None
    return found[1]


def sick(seen):
    return msgspec.structs.replace(
        seen, fabric_gpus=(msgspec.structs.replace(seen.fabric_gpus[0], healthy=False), *seen.fabric_gpus[1:])
    )


def test_a_change_sends_the_racks_that_changed_and_no_others():
    seen = snapshot(4, 3, ("acme", None))

    async def scenario(client, site):
        await sign_in(client)
        page = (await client.get("/")).text
        async with client.stream("GET", f"/map/live?after={position(page)}") as stream:
            site.show(examined(sick(seen)))
            return page, await events(stream, 1)

    page, [(_, markup)] = visit(scenario, examined(seen))
    racks = [part for part in parts(markup) if part.startswith("r") and f'id="{part}" class="rack"' in page]
    assert len(racks) == 1
    assert "critical" in markup


@pytest.mark.slow
def test_one_who_comes_back_gets_what_was_missed():
    seen = snapshot(2, 2, ("acme",))

    async def scenario(client, site):
        await sign_in(client)
        at = position((await client.get("/")).text)
        site.show(examined(sick(seen)))
        await asyncio.sleep(0.5)
        await client.get("/")
        async with client.stream("GET", "/map/live", headers={"Last-Event-ID": at}) as stream:
            return await events(stream, 1)

    [(_, markup)] = visit(scenario, examined(seen))
    assert "critical" in markup


def test_a_position_that_is_no_number_is_none():
    async def scenario(client, _):
        await sign_in(client)
        boot = position((await client.get("/")).text).partition(".")[0]
        async with client.stream("GET", f"/map/live?after={boot}.{'9' * 5000}") as stream:
            return await events(stream, 1)

    [(_, markup)] = visit(scenario)
    assert "racks" in parts(markup)


@pytest.mark.parametrize(("of_one", "of_all", "other"), [(2, 9, 200), (9, 2, 429)])
def test_streams_are_few_and_what_ends_makes_room(monkeypatch, of_one, of_all, other):
    monkeypatch.setattr(pages, "MAX_OF_VIEWER", of_one)
    monkeypatch.setattr(pages, "MAX_STREAMS", of_all)

    async def scenario(client, _):
        async def opened(person):
            async with client.stream("GET", "/map/live", headers={"Cookie": person}) as stream:
                return stream.status_code

        async def opened_in_time(person):
            while (status := await opened(person)) == 429:
                await asyncio.sleep(0.02)
            return status

        provider, two = "rackloom-map=provider:operator-token", "rackloom-map=acme:acme-token"
        renewed = "rackloom-map=provider:renewed-token"
        hold = lambda: client.stream("GET", "/map/live", headers={"Cookie": provider})  # noqa: E731
        async with hold() as first, hold() as second:
            held = [first.status_code, second.status_code]
            refused = await opened(provider), await opened(renewed), await opened(two)
            page = await client.get("/map/gpu/r0/0/0", headers={"Cookie": provider})
        return held, refused, page.status_code, await opened_in_time(provider)

    assert visit(scenario) == ([200, 200], (429, 429, other), 404, 200)


def test_a_request_for_a_gpu_starts_no_reading_while_a_page_is_followed(monkeypatch):
    monkeypatch.setattr(live, "AT_LEAST", 3600.0)
    monkeypatch.setattr(live, "PAUSE", 0.0)

    async def scenario(client, site):
        await sign_in(client)
        async with client.stream("GET", "/map/live") as stream:
            lines = stream.aiter_lines()
            await anext(lines)
            # The stream may start from an earlier reading. Once it waits for changes, it has the current one.
            await site.followed.wait()
            before = site.reads
            for _ in range(5):
                await asyncio.sleep(0.05)
                await client.get("/map/gpu/r0/0/0")
            return site.reads - before

    assert visit(scenario) == 0


@pytest.mark.slow
@pytest.mark.parametrize("at", ["", "nonsense", "0.0", "other-process.7", "-1"])
def test_one_with_a_position_of_elsewhere_gets_everything(at):
    async def scenario(client, _):
        await sign_in(client)
        async with client.stream("GET", "/map/live", params={"after": at}) as stream:
            return await events(stream, 1)

    [(_, markup)] = visit(scenario)
    assert {"racks", "legend", "room", "findings", "timeline", "reading"} <= set(parts(markup))


def test_racks_that_come_bring_all_of_them_in_order():
    async def scenario(client, site):
        await sign_in(client)
        at = position((await client.get("/")).text)
        site.show(examined(snapshot(3, 3)))
        async with client.stream("GET", f"/map/live?after={at}") as stream:
            return await events(stream, 1)

    [(_, markup)] = visit(scenario)
    assert "racks" in parts(markup)
    assert re.findall(r"<b>(rack-\d+)</b>", markup) == ["rack-00", "rack-01", "rack-02"]


def test_a_site_that_cannot_be_read_is_said_to_be_so_and_heals():
    async def scenario(client, site):
        await sign_in(client)
        at = position((await client.get("/")).text)
        async with client.stream("GET", f"/map/live?after={at}") as stream:
            site.breaks(True)
            [(_, broken)] = await events(stream, 1)
        site.breaks(False)
        return broken

    broken = visit(scenario)
    assert "Not current" in broken
    assert "the store is busy" in broken


def test_a_finding_links_to_its_runbook_which_strangers_do_not_read():
    async def scenario(client, _):
        stranger = await client.get("/map/runbook/gpu-health")
        await sign_in(client)
        page = (await client.get("/")).text
        books = [await client.get(f"/map/runbook/{name}") for name in ("gpu-health", "measles")]
        return stranger.status_code, page, books

    sick = snapshot(1, 1, ("acme",))
    sick = msgspec.structs.replace(
        sick, fabric_gpus=(msgspec.structs.replace(sick.fabric_gpus[0], healthy=False), *sick.fabric_gpus[1:])
    )
    stranger, page, (book, none) = visit(scenario, examined(sick, findings=examine(sick)))
    assert stranger == 303
    assert 'href="/map/runbook/gpu-health"' in page
    assert runbooks()["gpu-health"].mend in book.text
    assert 'href="/map/runbook/device-untainted"' in book.text
    assert book.headers["content-security-policy"] == pages.CONTENT_POLICY
    assert (book.status_code, none.status_code) == (200, 404)
    assert none.text.count("/map/runbook/") == len(runbooks())


def test_operators_have_links_to_grafana_with_the_time_that_they_look_at():
    async def scenario(client, _):
        await sign_in(client)
        now = (await client.get("/")).text
        address = "/map/at/" + datetime.fromtimestamp(AT, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
        then = (await client.get(address)).text
        await sign_in(client, org="acme", token="acme-token")
        return now, then, (await client.get("/")).text

    now, then, tenants = visit(scenario, grafana="https://grafana.test/team/")
    addresses = re.findall(r'href="(https://grafana[^"]*)"', now)
    written = {json.loads(file.read_text())["uid"] for file in DASHBOARD_FILES.glob("*.json")}
    assert {urlsplit(html.unescape(found)).path for found in addresses} == {
        f"/team/d/{uid}" for uid in written
    }
    (site,) = (html.unescape(found) for found in re.findall(r'href="(https://[^"]*-site[^"]*)"', then))
    hour = {name: int(value) / 1000 for name, value in parse_qsl(urlsplit(site).query)}
    assert hour == {"from": int(AT) - 1800, "to": int(AT) + 1800}
    assert "grafana" not in tenants


def test_after_signing_in_a_browser_has_the_page_that_it_wanted():
    async def scenario(client, _):
        wanted = await client.get("/?by=health")
        door = await client.get(wanted.headers["location"])
        (target,) = set(re.findall(r'name="to" value="([^"]*)"', door.text))
        signed = await client.post("/map/login", data=OPERATOR | {"to": html.unescape(target)}, headers=OURS)
        elsewhere = await client.post("/map/login", data=OPERATOR | {"to": "//elsewhere.test"}, headers=OURS)
        return signed.headers["location"], elsewhere.headers["location"]

    assert visit(scenario) == ("/?by=health", "/")
