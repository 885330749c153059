"""How tenants and operators see a domain if its controllers contradict one another."""

from typing import Any

import msgspec
import pytest

from rackloom.carve.api.auth import Role
from rackloom.carve.inventory import endpoints
from rackloom.carve.observation import latest
from rackloom.carve.reconcile import records

SECOND = "http://second"


@pytest.fixture
def disputed(api: Any) -> tuple[str, dict[str, Any], str]:
    """A domain, the instance in it that was Ready, and the time since which it is in dispute."""
    site = api.site
    made = api.instance(
        api.vpc(), nvLinkInterfaces=[{"nvLinkLogicalPartitionId": api.partition(), "deviceInstance": 0}]
    )
    site.converge()
    (row,) = api.get(f"instance/{made['id']}").json()["nvLinkInterfaces"]
    domain = row["nvLinkDomainId"]
    site.run(endpoints.register_endpoint, SECOND, ["CHASSIS9"], site.tick(), site.ids)
    second = next(endpoint.id for endpoint in site.read(endpoints.all_endpoints) if endpoint.url == SECOND)
    seen = msgspec.structs.replace(site.observation(domain, at=site.tick()), partitions=())
    site.run(records.record_observation, second, seen, site.tick())
    return domain, made, latest.rfc3339(seen.observed_at)


def test_everything_says_since_when_and_its_operator_who_contradicts_whom(
    api: Any, disputed: tuple[str, dict[str, Any], str]
) -> None:
    domain, made, since = disputed
    shown = api.get(f"nvlink-domain/{domain}", role=Role.PROVIDER_ADMIN).json()
    assert (shown["status"], shown["unknownSince"], shown["observedAt"]) == ("Unknown", since, None)
    doubt = shown["statusMessage"]
    assert doubt.startswith(f"unknown since {since}: switch controllers {SECOND} and http://switch/{domain} ")
    assert doubt.endswith("contradict one another: partition 1 has 0 and 1 members")
    now = api.get(f"instance/{made['id']}").json()
    assert now["status"] == "Configuring"
    assert now["unknownSince"] == now["statusHistory"][0]["created"]
    assert now["statusHistory"][0]["status"] == "Unknown"
    message = f"unknown since {since}: {latest.CONFLICT_REASON}"
    assert message in now["statusHistory"][0]["message"]
    (row,) = api.get(f"instance/{made['id']}/nvlink-interface").json()
    assert (row["status"], row["statusMessage"]) == ("Pending", message)
    found = api.get("nvlink-partition", role=Role.PROVIDER_ADMIN).json()
    assert [row for row in found if row["nvLinkDomainId"] == domain] == []


def test_two_domains_that_list_the_same_hardware_both_say_so(api: Any) -> None:
    site = api.site
    site.observe_all()
    domain = min(site.endpoint)
    site.run(endpoints.register_endpoint, SECOND, ["CHASSIS9"], site.tick(), site.ids)
    second = next(endpoint.id for endpoint in site.read(endpoints.all_endpoints) if endpoint.url == SECOND)
    copy = "00000000-0000-4000-8000-00000000dead"
    seen = msgspec.structs.replace(site.observation(domain, at=site.tick()), domain=copy)
    site.run(records.record_observation, second, seen, site.tick())
    for name in (domain, copy):
        shown = api.get(f"nvlink-domain/{name}", role=Role.PROVIDER_ADMIN).json()
        assert (shown["status"], shown["unknownSince"]) == ("Unknown", latest.rfc3339(seen.observed_at))
        assert f"domain {domain} " in shown["statusMessage"]
        assert f"domain {copy} " in shown["statusMessage"]
        assert shown["statusMessage"].endswith("both list the same 12 GPUs")


def test_it_is_told_as_it_happens_and_when_it_ends(
    api: Any, disputed: tuple[str, dict[str, Any], str]
) -> None:
    domain, made, _ = disputed
    body = {"reason": "it lies"}
    gone = api.call("DELETE", "nvlink-nmxc-endpoint/CHASSIS9", body, role=Role.PROVIDER_ADMIN)
    assert gone.status_code in (200, 202, 204), gone.text
    shown = api.get(f"nvlink-domain/{domain}", role=Role.PROVIDER_ADMIN).json()
    assert (shown["status"], shown["unknownSince"], shown["statusMessage"]) == ("Observed", None, None)
    now = api.get(f"instance/{made['id']}").json()
    assert (now["status"], now["unknownSince"]) == ("Ready", None)
    assert [entry["status"] for entry in now["statusHistory"]][:2] == ["Ready", "Unknown"]
