"""Messages and addresses of controllers are for their operators: no tenant reads an address."""

import re
from collections.abc import Callable
from typing import Any

import msgspec
import pytest

from rackloom.carve.api.auth import Role
from rackloom.carve.inventory import endpoints
from rackloom.carve.observation.latest import CONFLICT_REASON, UNREADABLE_REASON
from rackloom.carve.reconcile import records
from rackloom.carve.store import journal

SECOND = "http://10.20.30.40:9370"
CAUSE = "Hello: UNAVAILABLE: failed to connect to all addresses; last error: ipv4:10.20.30.41:9370: refused"
ADDRESS = re.compile(r"10\.20\.30|9370|://|switch/")
"""Patterns that no text may contain. The first controller of the small site is at http://switch/UUID."""


def lost(api: Any, domain: str) -> None:
    api.site.lose(domain, CAUSE)


def contradicted(api: Any, domain: str) -> None:
    site = api.site
    second = register_second(site)
    seen = msgspec.structs.replace(site.observation(domain, at=site.tick()), partitions=())
    assert site.run(records.record_observation, second, seen, site.tick()) is not None


def listed_twice(api: Any, domain: str) -> None:
    site = api.site
    second = register_second(site)
    copy = "00000000-0000-4000-8000-00000000dead"
    seen = msgspec.structs.replace(site.observation(domain, at=site.tick()), domain=copy)
    assert site.run(records.record_observation, second, seen, site.tick()) is not None


def register_second(site: Any) -> str:
    site.run(endpoints.register_endpoint, SECOND, ["CHASSIS9"], site.tick(), site.ids)
    return next(endpoint.id for endpoint in site.read(endpoints.all_endpoints) if endpoint.url == SECOND)


def one_joined(api: Any, name: str) -> Any:
    spec = {"nvLinkLogicalPartitionId": api.partition(f"lp-{name}"), "deviceInstance": 0}
    return api.instance(api.vpc(f"net-{name}"), name, nvLinkInterfaces=[spec])


def everything_readable(api: Any, ids: dict[str, str]) -> dict[str, str]:
    """The text of each GET that a tenant may send, by path."""
    texts = {}
    for path, methods in api.client.app.openapi()["paths"].items():
        if "get" not in methods or path.endswith("/event"):
            continue
        asked = path.partition("/nico/")[2]
        for name, value in ids.items():
            asked = asked.replace(f"{{{name}}}", value)
        answer = api.get(asked) if "{" not in asked else None
        if answer is not None and answer.status_code == 200:
            texts[asked] = answer.text
    return texts


@pytest.mark.slow
@pytest.mark.parametrize(
    ("happens", "message"),
    [(lost, UNREADABLE_REASON), (contradicted, CONFLICT_REASON), (listed_twice, CONFLICT_REASON)],
)
def test_a_tenant_reads_since_when_and_no_address(
    api: Any, happens: Callable[[Any, str], None], message: str
) -> None:
    site = api.site
    stays, leaves = one_joined(api, "one"), one_joined(api, "two")
    site.converge()
    (row,) = api.get(f"instance/{stays['id']}").json()["nvLinkInterfaces"]
    domain = row["nvLinkDomainId"]
    happens(api, domain)
    api.delete(f"instance/{leaves['id']}")
    shown = api.get(f"nvlink-domain/{domain}").json()
    doubt = f"unknown since {shown['unknownSince']}: {message}"
    assert shown["statusMessage"] == doubt
    (row,) = api.get(f"instance/{stays['id']}/nvlink-interface").json()
    assert row["statusMessage"] == doubt
    ids = {"instanceId": stays["id"], "nvLinkDomainId": domain, "siteId": site.site_id}
    texts = everything_readable(api, ids)
    assert {f"instance/{stays['id']}/status-history", "nvlink-interface", "nvlink-domain"} <= texts.keys()
    tenant = api.get("tenant/current").json()["id"]
    texts["events"] = repr(site.read(journal.events_after, tenant, 0, 1000))
    # A place there is not given away, and the refusal is read as well.
    more = {"namePrefix": "more", "count": 2, "vpcId": stays["vpcId"], "instanceTypeId": site.type_id}
    spec = {"nvLinkLogicalPartitionId": row["nvLinkLogicalPartitionId"], "deviceInstance": 0}
    more |= {"requireSameDomain": True, "nvLinkInterfaces": [spec]}
    refusal = api.post("instance/batch", more)
    assert refusal.status_code == 409, refusal.text
    texts["refusal"] = refusal.text
    assert {name: ADDRESS.findall(text) for name, text in texts.items() if ADDRESS.search(text)} == {}


@pytest.mark.parametrize("role", [Role.PROVIDER_ADMIN, Role.PROVIDER_VIEWER])
def test_whoever_operates_the_domain_reads_all_of_it(api: Any, role: Role) -> None:
    domain = min(api.site.endpoint)
    api.site.observe_all()
    lost(api, domain)
    shown = api.get(f"nvlink-domain/{domain}", role=role).json()
    assert shown["statusMessage"] == f"unknown since {shown['unknownSince']}: {CAUSE}"
