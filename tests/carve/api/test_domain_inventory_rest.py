"""NVLink domains as contract 2.0.0 lists them, and the port for their power and firmware."""

from collections.abc import Iterator, Sequence
from typing import Any
from uuid import UUID

import msgspec
import pytest

from rackloom.carve.api.auth import Role
from rackloom.carve.api.domain_operations import FirmwareUpdate, PowerState

ADMIN, VIEWER, TENANT = Role.PROVIDER_ADMIN, Role.PROVIDER_VIEWER, Role.TENANT_ADMIN
UNKNOWN = "11111111-1111-4111-8111-111111111111"
TASK = UUID("22222222-2222-4222-8222-222222222222")


def listed(api: Any, query: str = "", role: Role = ADMIN) -> Any:
    answer = api.get(f"domain/nvlink?siteId={api.site.site_id}{query}", role=role)
    assert answer.status_code == 200, answer.text
    return answer


def test_the_domains_of_a_site(api: Any) -> None:
    api.site.observe_all()
    found = listed(api).json()
    assert {domain["id"] for domain in found} == set(api.site.partitions)
    for domain in found:
        assert domain["rackGroupId"] == domain["nmxcClusterId"] == domain["id"]
        assert (domain["operationStatus"], domain["components"]) == ("Ready", [])
    assert found == sorted(found, key=lambda domain: (domain["name"], domain["id"]))
    assert listed(api, role=VIEWER).json() == found


def test_decoders_of_this_object_refuse_null(api: Any) -> None:
    api.site.observe_all()
    for domain in listed(api, "&includeComponents=true").json():
        assert None not in domain.values()
        assert all(None not in component.values() for component in domain["components"])


def test_the_trays_of_a_domain(api: Any) -> None:
    api.site.observe_all()
    instance = api.instance(api.vpc())
    machine = api.get(f"machine/{instance['machineId']}", role=ADMIN).json()
    by_id = {domain["id"]: domain for domain in listed(api, "&includeComponents=true").json()}
    trays = {tray["componentId"]: tray for domain in by_id.values() for tray in domain["components"]}
    assert trays.keys() == {shown["id"] for shown in api.get("machine", role=ADMIN).json()}
    assert (trays[machine["id"]]["type"], trays[machine["id"]]["operationStatus"]) == ("Compute", "InUse")
    (used,) = (
        domain
        for domain in by_id.values()
        if machine["id"] in {tray["componentId"] for tray in domain["components"]}
    )
    assert used["operationStatus"] == "InUse"
    path = f"domain/nvlink/{used['id']}?siteId={api.site.site_id}&includeComponents=true"
    alone = api.get(path, role=ADMIN)
    assert alone.json() == used


def test_a_domain_that_cannot_be_read_is_unknown(api: Any) -> None:
    api.site.observe_all()
    domain = next(iter(api.site.partitions))
    api.delete("nvlink-nmxc-endpoint/CHASSIS0", role=ADMIN)
    shown = api.get(f"domain/nvlink/{domain}?siteId={api.site.site_id}", role=ADMIN).json()
    assert shown["operationStatus"] == "Unknown"


def test_pages_orders_and_names(api: Any) -> None:
    api.site.observe_all()
    everything = listed(api).json()
    names = [domain["name"] for domain in everything]
    page = listed(api, "&pageSize=1&pageNumber=2")
    assert page.json() == everything[1:2]
    assert f'"total":{len(everything)}' in page.headers["X-Pagination"]
    assert listed(api, "&orderBy=NAME_DESC").json() == everything[::-1]
    assert listed(api, f"&name={names[0]}&name=none").json() == [
        domain for domain in everything if domain["name"] == names[0]
    ]
    for order in ("CREATED_ASC", "STATUS_DESC"):
        refused = api.get(f"domain/nvlink?siteId={api.site.site_id}&orderBy={order}", role=ADMIN)
        assert (refused.status_code, list(refused.json()["data"])) == (400, ["orderBy"])


@pytest.mark.parametrize("path", ["domain/nvlink", f"domain/nvlink/{UNKNOWN}"])
def test_what_a_read_must_name_and_may_not(api: Any, path: str) -> None:
    assert list(api.get(path, role=ADMIN).json()["data"]) == ["siteId"]
    unknown = api.get(f"{path}?siteId={UNKNOWN}", role=ADMIN)
    assert (unknown.status_code, unknown.json()["data"]) == (400, {"siteId": "does not exist"})
    extra = api.get(f"{path}?siteId={api.site.site_id}&nmae=x", role=ADMIN)
    assert (extra.status_code, list(extra.json()["data"])) == (400, ["nmae"])
    assert api.get(f"{path}?siteId={api.site.site_id}").status_code == 403


def test_an_unknown_domain_is_not_found(api: Any) -> None:
    assert api.get(f"domain/nvlink/{UNKNOWN}?siteId={api.site.site_id}", role=ADMIN).status_code == 404


# Power and firmware.


def operations(api: Any, domain: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """The path and body of each operation."""
    site = {"siteId": api.site.site_id}
    yield f"domain/nvlink/{domain}/power", site | {"state": "off"}
    yield "domain/nvlink/power", site | {"state": "acpowercycle", "domainIds": [domain]}
    yield f"domain/nvlink/{domain}/firmware", site | {"version": "1.0"}
    yield "domain/nvlink/firmware", site | {"domainIds": [domain], "overrideVersionCheck": True}


def test_without_a_program_for_it_power_and_firmware_are_refused(api: Any) -> None:
    for domain in (next(iter(api.site.partitions)), UNKNOWN):
        for path, body in operations(api, domain):
            answer = api.patch(path, body, role=ADMIN)
            assert answer.status_code == 412
            assert answer.json()["message"].startswith("No provider of power and firmware operations")


def test_what_is_refused_before(api: Any) -> None:
    domain = next(iter(api.site.partitions))
    for path, body in operations(api, domain):
        assert api.patch(path, body, role=TENANT).status_code == 403
        assert api.patch(path, body, role=VIEWER).status_code == 403
        wrong = [
            body | {"siteId": UNKNOWN},
            body | {"siteId": "x"},
            body | {"ruleId": "x"},
            body | {"overrideReadinessCheck": "yes"},
        ]
        if "state" in body:
            wrong += [body | {"state": "explode"}, {"siteId": body["siteId"]}]
        if "domainIds" in body:
            wrong += [body | {"domainIds": ids} for ids in ([], [" "], [domain, domain])]
        for changed in wrong:
            answer = api.patch(path, changed, role=ADMIN)
            assert answer.status_code == 400, (changed, answer.text)


class Recorder:
    """A program behind the port that records its calls."""

    def __init__(self) -> None:
        self.asked: list[tuple[Sequence[str], str | None]] = []

    async def set_power(self, domains: Sequence[str], wanted: PowerState) -> Sequence[UUID]:
        self.asked.append((domains, wanted.state))
        return [TASK]

    async def update_firmware(self, domains: Sequence[str], wanted: FirmwareUpdate) -> Sequence[UUID]:
        self.asked.append((domains, wanted.version))
        return [TASK]


@pytest.fixture
def recorder(api: Any) -> Iterator[Recorder]:
    state, recorder = api.client.app.state, Recorder()
    before = state.deps
    state.deps = msgspec.structs.replace(before, domain_operations=recorder)
    yield recorder
    state.deps = before


def test_a_configured_program_gets_the_request(api: Any, recorder: Recorder) -> None:
    api.site.observe_all()
    domain = next(iter(api.site.partitions))
    for path, body in operations(api, domain):
        answer = api.patch(path, body, role=ADMIN)
        assert (answer.status_code, answer.json()) == (200, {"taskIds": [str(TASK)]})
    assert recorder.asked == [([domain], wanted) for wanted in ("off", "acpowercycle", "1.0", None)]
    steps = api.get("operator-step", role=ADMIN).json()
    assert {(step["step"], step["nvLinkDomainId"]) for step in steps} == {
        ("switch-power", domain),
        ("update-firmware", domain),
    }
    assert "acpowercycle, over REST" in {step["reason"] for step in steps}


def test_a_program_is_asked_only_for_domains_of_the_site(api: Any, recorder: Recorder) -> None:
    for path, body in operations(api, UNKNOWN):
        assert api.patch(path, body, role=ADMIN).status_code == 404
    assert recorder.asked == api.get("operator-step", role=ADMIN).json() == []
