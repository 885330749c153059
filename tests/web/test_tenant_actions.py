"""A tenant carves, orders and releases on the map under the rules of REST, and attackers are refused."""

import html
import re
from typing import Any
from urllib.parse import urlencode

import pytest
from starlette.testclient import TestClient

from rackloom.app.site.rack_map import SiteSource, mount_rack_map
from rackloom.carve.api.auth import Role
from rackloom.carve.api.routing import problem_response
from rackloom.carve.tenancy import logical_partitions
from rackloom.carve.tenancy.entitlements import QuotaKind, set_quotas
from rackloom.web.forms import FORM_BYTES, TICKET_SECONDS
from rackloom.web.live import LiveMap
from rackloom.web.tenant_actions import MOST_RELEASED
from rackloom.web.viewers import COOKIE

ACTIONS = "/map/actions"
OURS = {"Sec-Fetch-Site": "same-origin"}
FORM_TYPE = {"Content-Type": "application/x-www-form-urlencoded"}
TENANT = Role.TENANT_ADMIN
Fields = list[tuple[str, str]]


class Browser:
    """Somebody at the map, with the cookie of one session."""

    def __init__(self, api: Any, site: Any, org: str, role: Role = TENANT, ttl: float = 7200.0) -> None:
        self.api = api
        self.client = TestClient(site, follow_redirects=False)
        self.client.portal = api.client.portal
        self.token = api.token(org, role, ttl)
        self.client.cookies.set(COOKIE, f"{org}:{self.token}")

    def look(self, path: str = "", **query: Any) -> Any:
        return self.client.get(ACTIONS + path, params=query)

    def plan(self, action: str, fields: Fields) -> Any:
        return self.client.get(f"{ACTIONS}/{action}?{urlencode(fields)}")

    def form(self, action: str, fields: Fields) -> Fields:
        """The fields of the form below the plan."""
        page = self.plan(action, fields)
        assert page.status_code == 200, problem_of(page)
        return form_of(page)

    def send(self, action: str, form: Fields, headers: dict[str, str] = OURS) -> Any:
        return self.client.post(
            f"{ACTIONS}/{action}", content=urlencode(form), headers={**headers, **FORM_TYPE}
        )

    def do(self, action: str, fields: Fields) -> Any:
        """The page after an action that must succeed."""
        answer = self.send(action, self.form(action, fields))
        assert answer.status_code == 303, problem_of(answer)
        return self.client.get(answer.headers["location"])

    def carve(self, name: str = "train") -> Fields:
        """Make a partition and its VPC, and return the fields of an order for it."""
        self.do("carve", [("name", name), ("site", self.api.site.site_id)])
        (vpc,) = (found["id"] for found in self.listed("vpc") if found["name"] == name)
        return [("vpc", vpc), ("type", self.api.site.type_id)]

    def listed(self, kind: str) -> Any:
        return self.api.get(kind, org=self.client.cookies[COOKIE].partition(":")[0]).json()


def form_of(page: Any) -> Fields:
    below = page.text.partition(f'<form method="post" action="{ACTIONS}/')[2]
    found = re.findall(r'<input type="hidden" name="([^"]*)" value="([^"]*)"', below)
    return [(name, html.unescape(value)) for name, value in found]


def problem_of(page: Any) -> str:
    found = re.search(r'class="trouble"[^>]*>(.*?)</p>', page.text)
    return html.unescape(found[1]) if found else ""


def with_field(form: Fields, name: str, value: str) -> Fields:
    return [(field, value if field == name else had) for field, had in form]


def pages_over(api: Any, rest: Any) -> Any:
    """The map beside REST. Its forms call `rest` in place of the real REST API."""
    store, clock = api.site.store, lambda: float(api.site.now)
    source = SiteSource(store, clock)
    return mount_rack_map(rest, LiveMap(source, clock), source, api.issuer.verifier(clock), clock)


@pytest.fixture
def site(api: Any) -> Any:
    api.site.observe_all()
    return pages_over(api, api.client.app)


@pytest.fixture
def demo(api: Any, site: Any) -> Browser:
    return Browser(api, site, "demo")


@pytest.fixture
def rival(api: Any, site: Any) -> Browser:
    return Browser(api, site, "rival")


# The intended use.


def test_a_tenant_carves_orders_and_releases_and_reads_each_plan_first(demo: Browser) -> None:
    plan = demo.plan("carve", [("name", "train"), ("site", demo.api.site.site_id)]).text
    assert "rackloom vpc create train --partition train" in plan
    assert plan.count('class="effect safe"') == 2
    assert demo.listed("vpc") == demo.listed("nvlink-logical-partition") == []
    target = demo.carve()
    (partition,), (vpc,) = demo.listed("nvlink-logical-partition"), demo.listed("vpc")
    assert vpc["nvLinkLogicalPartitionId"] == partition["id"]
    plan = demo.plan("batch", [("name", "job"), ("count", "3"), *target]).text
    assert "3 machines of type" in plan
    assert "tightest fit" in plan
    assert 'class="effect safe"' in plan
    assert demo.listed("instance") == []
    page = demo.do("batch", [("name", "job"), ("count", "3"), *target]).text
    assert "3 instances ordered: job-" in page
    made = demo.listed("instance")
    assert len({instance["nvLinkInterfaces"][0]["nvLinkDomainId"] for instance in made}) == 1
    chosen = [("instance", instance["id"]) for instance in made[:2]]
    plan = demo.plan("release", chosen).text
    assert 'class="effect destructive"' in plan
    assert len(demo.listed("instance")) == 3
    page = demo.do("release", chosen).text
    assert page.count("is being released.") == 2
    statuses = sorted(instance["status"] for instance in demo.listed("instance"))
    assert statuses.count("Terminating") == 2


def test_one_machine_is_an_instance_with_just_the_name(demo: Browser) -> None:
    demo.do("batch", [("name", "alone"), ("count", "1"), *demo.carve()])
    assert [found["name"] for found in demo.listed("instance")] == ["alone"]


def test_what_rest_refuses_is_refused_with_its_reason_before_anything_is_made(demo: Browser) -> None:
    target = demo.carve()
    again = demo.plan("carve", [("name", "train"), ("site", demo.api.site.site_id)])
    assert (again.status_code, "already exists" in problem_of(again)) == (409, True)
    # The typed values are kept.
    assert 'name="name" required minlength="2" maxlength="256" autocomplete="off" value="train"' in again.text
    large = demo.plan("batch", [("name", "job"), ("count", "4"), *target])
    assert (large.status_code, "must be between 2 and 3" in problem_of(large)) == (400, True)
    none = demo.plan("release", [])
    assert (none.status_code, problem_of(none)) == (400, "No instance is chosen")
    assert demo.listed("instance") == []


def test_quotas_are_those_of_rest(demo: Browser) -> None:
    target = demo.carve()
    tenant = demo.api.site.tenant
    demo.api.site.run(set_quotas, tenant.id, {QuotaKind.INSTANCES: 1, QuotaKind.VPCS: 1}, demo.api.site.now)
    over = demo.plan("batch", [("name", "job"), ("count", "2"), *target])
    assert over.status_code == 403
    assert "Current: 0, Requested: 2, Max: 1" in problem_of(over)
    # A quota on the second step of a plan shows before the first is done.
    assert demo.plan("carve", [("name", "more"), ("site", demo.api.site.site_id)]).status_code == 403


def test_the_audit_log_has_the_caller_of_a_form(demo: Browser) -> None:
    demo.carve()
    made = [
        (entry["operationId"], entry["userID"], entry["orgName"], entry["clientIP"], entry["statusCode"])
        for entry in demo.api.get("audit").json()
    ]
    who = ("local@demo", "demo", "testclient", 201)
    assert made == [("create-vpc", *who), ("create-nvlink-logical-partition", *who)]


def test_the_map_of_a_tenant_leads_to_the_forms_and_that_of_the_past_does_not(demo: Browser) -> None:
    page = demo.client.get("/?trays=2").text
    assert 'href="/map/actions"' in page
    assert "/map/actions?count=2#batch" in page
    then = re.search(r'datetime="([^"]+)"', page)
    assert then is not None
    past = demo.client.get(f"/map/at/{then[1]}")
    assert past.status_code == 200
    assert ACTIONS not in past.text


def test_an_operator_has_no_forms(api: Any, site: Any) -> None:
    operator = Browser(api, site, "demo", Role.PROVIDER_ADMIN)
    assert ACTIONS not in operator.client.get("/").text
    for answer in (operator.look(), operator.plan("carve", []), operator.send("carve", [])):
        assert answer.status_code == 403
        assert "for tenants" in answer.text
        assert f'action="{ACTIONS}/' not in answer.text


def test_who_has_no_role_of_a_tenant_reads_what_rest_says(api: Any, site: Any) -> None:
    viewer = Browser(api, site, "rival", Role.PROVIDER_VIEWER)
    answer = viewer.look()
    assert (answer.status_code, problem_of(answer) != "") == (403, True)
    assert f'action="{ACTIONS}/' not in answer.text


# A plan that holds no longer.


def test_an_order_whose_machines_somebody_else_got_is_planned_again(demo: Browser, rival: Browser) -> None:
    order = [("name", "job"), ("count", "2"), *demo.carve()]
    form = demo.form("batch", order)
    rival.do("batch", [("name", "theirs"), ("count", "2"), *rival.carve("theirs")])
    answer = demo.send("batch", form)
    assert answer.status_code == 409
    assert "this is the plan now" in problem_of(answer)
    assert demo.listed("instance") == []
    new = form_of(answer)
    assert dict(new)["plan"] != dict(form)["plan"]
    assert demo.send("batch", new).status_code == 303
    assert len(demo.listed("instance")) == 2


def test_a_plan_that_somebody_altered_is_planned_again(demo: Browser) -> None:
    form = demo.form("batch", [("name", "job"), ("count", "2"), *demo.carve()])
    for change in (("count", "3"), ("plan", "0" * 64), ("plan", "x" * 65), ("plan", "")):
        answer = demo.send("batch", with_field(form, *change))
        assert answer.status_code == 409, change
        assert demo.listed("instance") == []


def test_an_instance_that_is_gone_meanwhile_is_not_released_in_silence(demo: Browser) -> None:
    demo.do("batch", [("name", "job"), ("count", "2"), *demo.carve()])
    ids = [found["id"] for found in demo.listed("instance")]
    form = demo.form("release", [("instance", id_) for id_ in ids])
    demo.api.delete(f"instance/{ids[0]}")
    answer = demo.send("release", form)
    assert answer.status_code == 409
    assert "Already being released" in problem_of(answer)
    assert [found["status"] for found in demo.listed("instance")].count("Terminating") == 1


# Sent twice.


def test_a_form_that_is_sent_twice_is_carried_out_once(demo: Browser) -> None:
    form = demo.form("batch", [("name", "job"), ("count", "2"), *demo.carve()])
    answers = [demo.send("batch", form) for _ in range(3)]
    assert {(answer.status_code, answer.headers["location"]) for answer in answers} == {
        (303, f"{ACTIONS}?done={dict(form)['ticket']}")
    }
    assert len(demo.listed("instance")) == 2


def test_a_form_that_was_refused_may_be_sent_again(demo: Browser) -> None:
    form = demo.form("batch", [("name", "job"), ("count", "3"), *demo.carve()])
    tenant, now = demo.api.site.tenant, demo.api.site.now
    for limit, status, made in ((1, 403, 0), (None, 303, 3), (1, 303, 3)):
        demo.api.site.run(set_quotas, tenant.id, {QuotaKind.INSTANCES: limit}, now)
        assert demo.send("batch", form).status_code == status
        assert len(demo.listed("instance")) == made


def test_nobody_reads_the_outcome_of_somebody_elses_order(demo: Browser, rival: Browser) -> None:
    form = demo.form("carve", [("name", "secret-name"), ("site", demo.api.site.site_id)])
    done = demo.send("carve", form).headers["location"]
    assert "secret-name" in demo.client.get(done).text
    page = rival.client.get(done)
    assert page.status_code == 200
    assert "secret-name" not in page.text


# Attacks.


def refused_without_effect(browser: Browser, answer: Any, status: int) -> str:
    assert answer.status_code == status, problem_of(answer)
    assert browser.listed("nvlink-logical-partition") == browser.listed("vpc") == []
    return problem_of(answer)


def carving(browser: Browser, name: str = "train") -> Fields:
    return browser.form("carve", [("name", name), ("site", browser.api.site.site_id)])


@pytest.mark.parametrize(
    "headers",
    [{"Sec-Fetch-Site": "cross-site"}, {"Sec-Fetch-Site": "same-site"}, {"Origin": "http://elsewhere"}, {}],
)
def test_a_form_of_another_site_is_refused(demo: Browser, headers: dict[str, str]) -> None:
    answer = demo.send("carve", carving(demo), headers)
    assert "another site" in refused_without_effect(demo, answer, 403)


@pytest.mark.parametrize("proof", ["", "0" * 64, "ü", "\x00", "a" * 2000])
def test_a_form_without_the_proof_of_its_session_is_refused(demo: Browser, proof: str) -> None:
    form = carving(demo)
    refused_without_effect(demo, demo.send("carve", with_field(form, "proof", proof)), 403)
    without = [(name, value) for name, value in form if name not in ("ticket", "proof")]
    refused_without_effect(demo, demo.send("carve", without), 403)


def test_a_ticket_is_good_for_its_session_its_action_and_its_id_only(
    api: Any, site: Any, demo: Browser, rival: Browser
) -> None:
    form = carving(demo)
    ticket = {name: dict(form)[name] for name in ("ticket", "proof")}
    api.site.tick()
    renewed = Browser(api, site, "demo", ttl=3000.0)
    for other in (rival, renewed):
        own = carving(other)
        mixed = [(name, ticket.get(name, value)) for name, value in own]
        refused_without_effect(other, other.send("carve", mixed), 403)
    refused_without_effect(demo, demo.send("release", [*ticket.items(), ("plan", "x")]), 403)
    for id_ in ("1.abc", f"{int(api.site.now)}.{'A' * 22}", "x", "1" * 5000, f"{'9' * 12}.{'A' * 22}"):
        refused_without_effect(demo, demo.send("carve", with_field(form, "ticket", id_)), 403)
    assert demo.send("carve", form).status_code == 303


@pytest.mark.parametrize("age", [TICKET_SECONDS - 1, TICKET_SECONDS])
def test_a_page_is_good_for_an_hour(demo: Browser, age: float) -> None:
    form = carving(demo)
    demo.api.site.tick(age)
    answer = demo.send("carve", form)
    if age < TICKET_SECONDS:
        assert answer.status_code == 303
    else:
        assert "more than an hour old" in refused_without_effect(demo, answer, 403)


def test_a_viewer_whose_token_has_expired_comes_to_the_door(api: Any, site: Any, demo: Browser) -> None:
    short = Browser(api, site, "demo", ttl=60.0)
    form = carving(short)
    api.site.tick(61)
    for answer in (short.send("carve", form), short.look(), short.plan("carve", [])):
        assert (answer.status_code, answer.headers["location"].partition("?")[0]) == (303, "/map/login")
    assert demo.listed("vpc") == []


def test_what_belongs_to_others_is_refused_and_no_word_of_it_is_shown(demo: Browser, rival: Browser) -> None:
    demo.do("batch", [("name", "their-secret-job"), ("count", "2"), *demo.carve("their-secret-net")])
    vpc = demo.listed("vpc")[0]["id"]
    theirs = [("instance", found["id"]) for found in demo.listed("instance")]
    orders = [
        ("batch", [("name", "job"), ("count", "2"), ("vpc", vpc), ("type", demo.api.site.type_id)]),
        ("release", theirs),
    ]
    for action, fields in orders:
        planned = rival.plan(action, fields)
        assert planned.status_code in (400, 403, 404)
        # The ticket of the rival's valid action, with another tenant's objects in the fields.
        own = dict(carving(rival))
        sent = rival.send(
            action, [*fields, ("ticket", own["ticket"]), ("proof", own["proof"]), ("plan", "x")]
        )
        assert sent.status_code == 403
        for page in (planned, sent, rival.look()):
            assert "their-secret" not in page.text
    assert {found["status"] for found in demo.listed("instance")}.isdisjoint({"Terminating"})
    # With a ticket of the right action it is REST that refuses.
    rival.do("batch", [("name", "own"), ("count", "1"), *rival.carve("own")])
    form = rival.form("release", [("instance", rival.listed("instance")[0]["id"])])
    mixed = [*theirs, *((name, value) for name, value in form if name != "instance")]
    assert rival.send("release", mixed).status_code == 403
    assert {found["status"] for found in demo.listed("instance")}.isdisjoint({"Terminating"})


def test_a_form_that_is_too_large_is_refused(demo: Browser) -> None:
    answer = demo.send("carve", with_field(carving(demo), "name", "x" * FORM_BYTES))
    assert str(FORM_BYTES) in refused_without_effect(demo, answer, 413)


def test_a_name_of_ten_thousand_characters_is_refused_and_not_repeated(demo: Browser) -> None:
    answer = demo.plan("carve", [("name", "x" * 10_000), ("site", demo.api.site.site_id)])
    refused_without_effect(demo, answer, 400)
    assert "x" * 257 not in answer.text


@pytest.mark.parametrize("more", [("nvLinkInterfaces", "[]"), ("name", "twice"), ("", ""), ("<b>", "1")])
def test_fields_that_an_action_does_not_have_are_refused(demo: Browser, more: tuple[str, str]) -> None:
    form = carving(demo)
    refused_without_effect(demo, demo.send("carve", [*form, more]), 400)
    planned = demo.plan("carve", [("name", "train"), ("site", demo.api.site.site_id), more])
    assert planned.status_code == 400
    assert "<b>" not in planned.text.partition("<main")[2].replace("<b>small", "")


@pytest.mark.parametrize("count", ["", "-1", "1.5", "1e3", "٣", "9" * 400, "0", "two"])
def test_what_is_no_number_of_machines_is_refused(demo: Browser, count: str) -> None:
    target = demo.carve()
    assert demo.plan("batch", [("name", "job"), ("count", count), *target]).status_code == 400
    assert demo.listed("instance") == []


@pytest.mark.parametrize(
    "id_", ["x", "..", "../vpc", "", "\x00", "a/../../demo/nico/vpc", "type", "batch", "٣" * 32]
)
def test_an_id_cannot_lead_elsewhere(demo: Browser, id_: str) -> None:
    answer = demo.plan("release", [("instance", id_)])
    assert (answer.status_code, problem_of(answer)) == (400, "The form names an instance by what is no id")


@pytest.mark.parametrize(
    "name", ["<script>alert(1)</script>", '"><img src=x>', "{{ 7*7 }}", "a'b && rm -rf c"]
)
def test_a_name_is_text_wherever_it_is_shown(demo: Browser, name: str) -> None:
    plan = demo.plan("carve", [("name", name), ("site", demo.api.site.site_id)])
    pages = [plan]
    if plan.status_code == 200:
        answer = demo.send("carve", form_of(plan))
        pages += [demo.client.get(answer.headers["location"]), demo.look()]
        (made,) = demo.listed("vpc")
        assert made["name"] == name
    for page in pages:
        assert name.partition("&")[0] not in page.text or not {"<", '"'} & set(name)
        assert "<script>alert" not in page.text
        assert "<img" not in page.text


def test_no_more_are_released_at_a_time_than_a_form_holds(demo: Browser) -> None:
    ids = [("instance", f"00000000-0000-4000-8000-{number:012}") for number in range(MOST_RELEASED + 1)]
    answer = demo.plan("release", ids)
    assert (answer.status_code, "in parts" in problem_of(answer)) == (400, True)


@pytest.mark.parametrize("path", ["/nothing", "/carve/x", "/CARVE"])
def test_there_are_three_actions(demo: Browser, path: str) -> None:
    assert demo.look(path).status_code == 404


def test_a_page_holds_no_token_and_stays_in_no_cache(demo: Browser) -> None:
    for page in (demo.look(), demo.plan("carve", [("name", "train"), ("site", demo.api.site.site_id)])):
        assert demo.token not in page.text
        assert page.headers["cache-control"] == "no-store"
        assert "form-action 'self'" in page.headers["content-security-policy"]


# Failures half way.


def test_a_partition_whose_vpc_is_refused_is_deleted_again(api: Any, demo: Browser) -> None:
    async def name_is_taken(scope: Any, receive: Any, send: Any) -> None:
        """Between the plan and its second step, another client makes a VPC of that name."""
        if scope["path"].endswith("/vpc") and scope["method"] == "POST" and not scope["query_string"]:
            await api.site.store.run(new_vpc, api, "train")
        await api.client.app(scope, receive, send)

    form = carving(demo)
    answer = Browser(api, pages_over(api, name_is_taken), "demo").send("carve", form)
    assert (answer.status_code, "already exists" in problem_of(answer)) == (409, True)
    assert len(demo.listed("vpc")) == 1
    assert demo.listed("nvlink-logical-partition") == []


def new_vpc(conn: Any, api: Any, name: str) -> None:
    wanted = logical_partitions.NewVpc(site_id=api.site.site_id, name=name)
    logical_partitions.create_vpc(conn, api.site.tenant.id, wanted, api.site.now, api.site.ids)


def test_a_release_that_ends_half_way_says_what_it_released(api: Any, demo: Browser) -> None:
    demo.do("batch", [("name", "job"), ("count", "3"), *demo.carve()])
    released: list[str] = []

    async def refusing_the_second(scope: Any, receive: Any, send: Any) -> None:
        if scope["method"] == "DELETE":
            released.append(scope["path"])
        refuse = len(released) > 1
        await (problem_response(503, "the store is busy") if refuse else api.client.app)(scope, receive, send)

    form = demo.form("release", [("instance", found["id"]) for found in demo.listed("instance")])
    browser = Browser(api, pages_over(api, refusing_the_second), "demo")
    answer = browser.send("release", form)
    assert answer.status_code == 303
    released.clear()
    page = browser.client.get(answer.headers["location"])
    assert page.text.count("is being released.") == 1
    assert problem_of(page) == "Not all was done: the store is busy"
    assert [found["status"] for found in demo.listed("instance")].count("Terminating") == 1


def test_where_nothing_was_decided_nothing_is_claimed(api: Any, demo: Browser) -> None:
    form = carving(demo)
    answer = Browser(api, pages_over(api, problem_response(503, "the store is busy")), "demo").send(
        "carve", form
    )
    assert (answer.status_code, answer.text) == (503, "the store is busy\n")
    assert demo.send("carve", form).status_code == 303
