"""In any state of the site, statistics agree with the lists that the same caller reads."""

import random
from collections import Counter
from typing import Any

import pytest
import sqlalchemy as sa

from rackloom.carve.api.auth import Role
from rackloom.carve.store import schema
from rackloom.carve.tenancy import entitlements

UNKNOWN = "11111111-1111-4111-8111-111111111111"
PROVIDER = {"role": Role.PROVIDER_VIEWER}
STATUSES = ("initializing", "ready", "inUse", "error", "maintenance", "unknown")


def scramble(api: Any, seed: int) -> None:
    """Put the site into a random state: instances of two tenants, cordons, types, lost domains."""
    site, dice = api.site, random.Random(seed)
    site.observe_all()
    site.other_tenant()
    partitions = {org: api.partition(org=org) for org in ("demo", "rival")}
    nets = {org: api.vpc(partition=partitions[org], org=org) for org in partitions}
    api.vpc("another")
    machines = [shown["id"] for shown in api.get("machine", **PROVIDER).json()]
    for number in range(dice.randrange(6)):
        org = dice.choice(("demo", "rival"))
        body = {"name": f"vm {number}", "vpcId": nets[org], "instanceTypeId": site.type_id}
        assert api.post("instance", body, org=org).status_code in (201, 409)
    if dice.random() < 0.7:
        site.converge()
    for machine in dice.sample(machines, dice.randrange(4)):
        api.post(f"machine/{machine}/cordon", {"reason": "repair"}, role=Role.PROVIDER_ADMIN)
    for machine in dice.sample(machines, dice.randrange(3)):
        api.delete(f"instance/type/{site.type_id}/machine/{machine}", role=Role.PROVIDER_ADMIN)
    for instance in api.get("instance").json()[: dice.randrange(3)]:
        api.delete(f"instance/{instance['id']}")
    if dice.random() < 0.5:
        statuses = {"status": dice.choice(("Initializing", "Error", "Unknown"))}
        chosen = schema.machine.c.id == dice.choice(machines)
        site.run(lambda conn: conn.execute(sa.update(schema.machine).where(chosen).values(statuses)))
    if dice.random() < 0.5:
        site.lose(dice.choice(list(site.partitions)))
    if dice.random() < 0.3:
        site.tick(10_000.0)


def listed(api: Any, path: str, **options: Any) -> list[Any]:
    shown: list[Any] = api.get(path, params={"pageSize": 100}, **options).json()
    return shown


def breakdown(machines: list[Any]) -> dict[str, int]:
    counts = Counter(machine["status"] for machine in machines)
    by_name = {name: counts[name[0].upper() + name[1:]] for name in STATUSES}
    return {"total": len(machines), **by_name}


@pytest.mark.parametrize("seed", range(6))
def test_statistics_are_the_numbers_of_the_lists(api: Any, seed: int) -> None:
    scramble(api, seed)
    machines = listed(api, "machine", **PROVIDER)
    used = [machine for machine in machines if machine["instanceId"] is not None]
    summary = api.get("machine/instance-type/stats/summary", **PROVIDER).json()
    assert summary == {
        "assigned": breakdown([machine for machine in machines if machine["instanceTypeId"]]),
        "unassigned": breakdown([machine for machine in machines if not machine["instanceTypeId"]]),
    }
    provider = api.get("infrastructure-provider/current/stats", **PROVIDER).json()
    assert provider["machine"].items() >= breakdown(machines).items()
    allocations = listed(api, "allocation", **PROVIDER)
    for kind in api.get("machine/instance-type/stats", **PROVIDER).json():
        of_type = [machine for machine in machines if machine["instanceTypeId"] == kind["id"]]
        assert kind["assignedMachineStats"] == breakdown(of_type)
        assert kind["usedMachineStats"] == breakdown([entry for entry in of_type if entry in used])
        given = {
            allocation["id"]: constraint["constraintValue"]
            for allocation in allocations
            for constraint in allocation["allocationConstraints"]
            if constraint["resourceTypeId"] == kind["id"]
        }
        assert kind["allocated"] == sum(given.values())
        ready = kind["assignedMachineStats"]["ready"]
        promised = kind["allocated"] - kind["usedMachineStats"]["total"]
        assert kind["maxAllocatable"] == max(0, ready - promised)
        shown = {
            entry["id"]: entry["allocated"] for tenant in kind["tenants"] for entry in tenant["allocations"]
        }
        assert shown == given
        for tenant in kind["tenants"]:
            mine = [entry for entry in of_type if entry["tenantId"] == tenant["id"]]
            assert tenant["usedMachineStats"] == breakdown(mine)
    for tenant in api.get("tenant/instance-type/stats", **PROVIDER).json():
        for kind in tenant["instanceTypes"]:
            mine = [entry for entry in used if entry["tenantId"] == tenant["id"]]
            assert kind["usedMachineStats"]["total"] == len(mine)
    for org in ("demo", "rival"):
        own = api.get("tenant/current/stats", org=org).json()
        instances = listed(api, "instance", org=org)
        unknown = {entry["id"] for entry in instances if entry["unknownSince"] is not None}
        counts = Counter(
            "unknown" if entry["id"] in unknown else entry["status"].lower() for entry in instances
        )
        numbers = {name: number for name, number in own["instance"].items() if number}
        assert numbers == {**counts, **({"total": len(instances)} if instances else {})}
        assert own["vpc"]["total"] == own["vpc"]["ready"] == len(listed(api, "vpc", org=org))
        assert own["subnet"]["total"] == len(listed(api, "subnet", org=org)) == 0


def test_an_instance_of_which_nothing_is_known_is_not_ready(api: Any) -> None:
    api.site.observe_all()
    api.instance(api.vpc(partition=api.partition()))
    api.site.converge()
    assert api.get("tenant/current/stats").json()["instance"]["ready"] == 1
    api.site.tick(10_000.0)
    shown = api.get("tenant/current/stats").json()["instance"]
    assert (shown["total"], shown["ready"], shown["unknown"]) == (1, 0, 1)


def test_statistics_of_a_site_are_for_its_provider(api: Any) -> None:
    api.site.run(entitlements.ensure_provider, "elsewhere", api.site.now, api.site.ids)
    paths = (
        "machine/instance-type/stats",
        "machine/instance-type/stats/summary",
        "tenant/instance-type/stats",
    )
    for path in paths:
        here = f"{path}?siteId={api.site.site_id}"
        assert api.get(here, **PROVIDER).json() == api.get(path, **PROVIDER).json()
        assert api.get(here, org="elsewhere", **PROVIDER).status_code == 403
        assert api.get(here).status_code == 403
        assert api.get(f"{path}?siteId={UNKNOWN}", **PROVIDER).status_code == 404
    empty = api.get("machine/instance-type/stats/summary", org="elsewhere", **PROVIDER).json()
    assert empty["assigned"]["total"] == empty["unassigned"]["total"] == 0
