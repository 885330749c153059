"""The steps of a takeover on both databases: interrupted after every transaction, repeated, undone."""

import msgspec
import pytest
import sqlalchemy as sa
from tests.carve.conftest import DOMAINS, GPUS, TRAYS

from rackloom.carve.partitions import intent
from rackloom.carve.reconcile import records
from rackloom.carve.reconcile.records import plan_of_domain
from rackloom.carve.store import prepared, schema
from rackloom.carve.store.journal import OperatorOrder
from rackloom.carve.store.values import Rejected
from rackloom.carve.takeover.site_reading import read_site
from rackloom.carve.takeover.steps import PAUSE_REASON, StepOrder, do_step, undo_step
from rackloom.carve.tenancy import entitlements, logical_partitions
from rackloom.core.partitions.domain import UNCERTAIN_REASON
from rackloom.core.takeover.planner import plan_takeover
from rackloom.core.takeover.records import (
    AdoptPartition,
    CordonMachine,
    CreateInstance,
    NicoAllocation,
    NicoInstance,
    NicoInstanceType,
    NicoInterface,
    NicoLogicalPartition,
    NicoQuota,
    NicoReading,
    NicoSite,
    NicoTenant,
    NicoVpc,
    PauseDomain,
    SettleDomain,
    StepState,
)

OLD = 0xA000
RECORDS = (
    "tenant", "instance_type", "allocation", "allocation_constraint", "logical_partition", "vpc", "instance",
    "nvlink_interface", "owned_partition", "cordon", "domain_pause", "foreign_tray",
)  # fmt: skip
TIMES = {"created", "updated", "intent_at", "seen_at", "operation_id", "status", "reason"}


def uuid(number):
    return f"00000000-0000-4000-{OLD:04x}-{number:012x}"


class Old:
    """NICo: acme with two instances in domain 0, globex with one in domain 1, and one that is terminating."""

    def __init__(self, site):
        self.site = site
        self.orgs = {"acme": 1, "globex": 2}
        self.instances = [
            self.instance("acme", 0, 0), self.instance("acme", 0, 1), self.instance("globex", 1, 0),
            self.instance("globex", 1, 1, status="Terminating"),
        ]  # fmt: skip

    def instance(self, org, domain, slot, *, status="Ready"):
        number = domain * 100 + slot
        return NicoInstance(
            id=uuid(1000 + number),
            org=org,
            name=f"job-{slot}",
            description=None,
            status=status,
            vpc=uuid(300 + self.orgs[org]),
            type_id=uuid(50),
            machine=f"chassis{domain}-{slot}",
            interfaces=tuple(
                NicoInterface(
                    id=uuid(10_000 + number * 10 + device),
                    device=device,
                    logical_partition=uuid(200 + self.orgs[org]),
                    status="Ready",
                    guid=str(self.site.guid(DOMAINS[domain], slot, device)),
                )
                for device in range(GPUS)
            ),
            extra={"labels": {"job": org}},
        )

    def name(self, org, domain):
        return uuid(200 + self.orgs[org]) + ",".join(map(str, sorted(self.members(org, domain))))

    def members(self, org, domain):
        return frozenset(
            int(entry.guid)
            for found in self.instances
            if (found.org, found.machine.split("-")[0], found.status) == (org, f"chassis{domain}", "Ready")
            for entry in found.interfaces
        )

    def reading(self):
        quota = [NicoQuota(id=uuid(450 + n), type_id=uuid(50), machines=TRAYS) for n in self.orgs.values()]
        gpus = {"type": "GPU", "name": "NVIDIA GB200", "count": GPUS, "deviceType": "NVLink"}
        of = {org: {"org": org, "description": None} for org in self.orgs}
        return NicoReading(
            site=NicoSite(id=uuid(9), name="old"),
            tenants=tuple(NicoTenant(id=uuid(100 + n), org=org) for org, n in self.orgs.items()),
            types=(
                NicoInstanceType(id=uuid(50), name="gb200", description=None, labels={}, capabilities=[gpus]),
            ),
            allocations=tuple(
                NicoAllocation(id=uuid(400 + n), name="all", quotas=(quota[n - 1],), **of[org])
                for org, n in self.orgs.items()
            ),
            logical_partitions=tuple(
                NicoLogicalPartition(id=uuid(200 + n), name="train", status="Ready", **of[org])
                for org, n in self.orgs.items()
            ),
            vpcs=tuple(
                NicoVpc(
                    id=uuid(300 + n),
                    name="net",
                    status="Ready",
                    logical_partition=uuid(200 + n),
                    extra={"labels": {}},
                    **of[org],
                )
                for org, n in self.orgs.items()
            ),
            instances=tuple(self.instances),
        )


class Operator:
    """Plans, does and undoes on the small site."""

    def __init__(self, site):
        self.site, self.old = site, Old(site)
        for org, domain in (("acme", 0), ("globex", 1)):
            site.partitions[DOMAINS[domain]][self.old.name(org, domain)] = self.old.members(org, domain)
        site.partitions[DOMAINS[0]]["made-by-hand"] = frozenset({site.guid(DOMAINS[0], 2, 0)})
        site.observe_all()
        self.before = self.rows()

    def plan(self):
        return plan_takeover(self.old.reading(), self.site.read(read_site))

    def do(self, *steps):
        return [self.site.run(do_step, step, self.order()).value for step in steps]

    def undo(self, *steps):
        return [self.site.run(undo_step, step, self.order()).value for step in steps]

    def order(self):
        return StepOrder(OperatorOrder("operator", "takeover", self.site.tick(0.01)), self.site.ids)

    def rows(self):
        """All records of tenants, without times and without the values that observations write."""
        return self.site.read(lambda conn: {name: _rows(conn, name) for name in RECORDS})

    def types_of_machines(self):
        return self.site.read(lambda conn: conn.execute(sa.select(schema.machine.c.instance_type_id)).all())

    def requested(self):
        """The changes requested of the fabric."""
        kinds = self.site.read(lambda conn: conn.execute(sa.select(schema.operation.c.kind)).scalars().all())
        return [kind for kind in kinds if kind != "adopt-partition"]

    def check_quiet(self):
        """Invariant: a domain is paused by the import, or the site would do nothing to it."""
        for domain in DOMAINS:
            if self.site.read(intent.pause_reason, domain) != PAUSE_REASON:
                assert self.site.read(plan_of_domain, domain).operations == ()


def _rows(conn, name):
    table = schema.metadata.tables[name]
    return sorted(
        str({key: value for key, value in row._mapping.items() if key not in TIMES})
        for row in conn.execute(sa.select(table))
    )


def undoing(plan):
    pauses = [step for step in plan.steps if isinstance(step, PauseDomain)]
    ends = [step for step in plan.steps if isinstance(step, SettleDomain)]
    recorded = [step for step in plan.steps if not isinstance(step, PauseDomain | SettleDomain)]
    return [*pauses, *reversed(recorded), *ends]


@pytest.fixture
def operator(small_site):
    return Operator(small_site)


def instance_statuses(site):
    rows = site.read(
        lambda conn: conn.execute(sa.select(schema.instance.c.id, schema.instance.c.status)).all()
    )
    return {row.id: row.status for row in rows}


def test_a_takeover_keeps_ids_asks_the_fabric_for_nothing_and_ends_ready(operator):
    site, plan = operator.site, operator.plan()
    assert {outcome.state for outcome in operator.do(*plan.steps)} == {StepState.DONE}
    site.observe_all()
    imported = [step.id for step in plan.steps if isinstance(step, CreateInstance)]
    assert instance_statuses(site) == dict.fromkeys(imported, "Ready")
    assert imported == [entry.id for entry in operator.old.instances if entry.status == "Ready"]
    interfaces = site.read(lambda conn: set(conn.execute(sa.select(schema.nvlink_interface.c.id)).scalars()))
    assert interfaces == {
        entry.id for known in operator.old.instances if known.id in imported for entry in known.interfaces
    }
    assert operator.requested() == []
    assert [step.machine for step in plan.steps if isinstance(step, CordonMachine)] == ["chassis1-1"]
    assert operator.plan().steps == ()
    for domain in DOMAINS:
        assert site.read(intent.pause_reason, domain) is None
        assert site.read(plan_of_domain, domain).operations == ()


def test_a_rollback_removes_exactly_what_the_import_created(operator):
    plan = operator.plan()
    types = operator.types_of_machines()
    operator.do(*plan.steps)
    operator.site.observe_all()
    assert {outcome.state for outcome in operator.undo(*undoing(plan))} == {StepState.DONE}
    assert operator.rows() == operator.before
    assert operator.types_of_machines() == types
    assert operator.requested() == []
    operator.site.observe_all()
    assert operator.rows() == operator.before
    assert {outcome.state for outcome in operator.undo(*undoing(plan)[2:-2])} == {StepState.ALREADY}
    assert operator.plan().steps == plan.steps


def test_an_import_that_is_repeated_does_nothing_twice(operator):
    plan = operator.plan()
    operator.do(*plan.steps)
    done = operator.rows()
    again = operator.do(*plan.steps)
    recorded = [
        outcome
        for step, outcome in zip(plan.steps, again, strict=True)
        if not isinstance(step, PauseDomain | SettleDomain)
    ]
    assert {outcome.state for outcome in recorded} == {StepState.ALREADY}
    assert operator.rows() == done


def test_what_was_removed_since_is_not_created_again(operator):
    site, plan = operator.site, operator.plan()
    operator.do(*plan.steps)
    step = next(step for step in plan.steps if step.__struct_config__.tag == "instance")
    site.run(prepared.delete_rows, schema.nvlink_interface, instance_id=step.id)
    site.run(prepared.delete_rows, schema.instance, id=step.id)
    (outcome,) = operator.do(step)
    assert (outcome.state, outcome.message) == (StepState.ALREADY, "removed since it was imported")
    assert site.row(schema.instance, step.id) is None


@pytest.mark.slow
def test_an_import_interrupted_after_any_transaction_is_repeated_to_the_same_end(operator):
    plan = operator.plan()
    operator.do(*plan.steps)
    whole = operator.rows()
    operator.undo(*undoing(plan))
    for cut in range(len(plan.steps) + 1):
        operator.do(*plan.steps[:cut])
        operator.check_quiet()
        operator.site.observe_all()
        operator.check_quiet()
        operator.do(*plan.steps)
        assert operator.rows() == whole, cut
        operator.undo(*undoing(plan))
        assert operator.rows() == operator.before, cut
    assert operator.requested() == []


@pytest.mark.slow
def test_a_rollback_of_any_part_interrupted_after_any_transaction_is_repeated_to_the_same_end(operator):
    plan = operator.plan()
    back = undoing(plan)
    for cut in range(len(back) + 1):
        operator.do(*plan.steps[: len(plan.steps) - cut // 2])
        operator.undo(*back[:cut])
        operator.check_quiet()
        operator.site.observe_all()
        operator.undo(*back)
        assert operator.rows() == operator.before, cut
    assert operator.requested() == []


# Refusals, and changes that stay paused.


def test_an_adoption_is_proved_again_when_it_is_done(operator):
    """Somebody changed the partition between plan and import: it is not adopted."""
    site, plan = operator.site, operator.plan()
    name = operator.old.name("acme", 0)
    site.partitions[DOMAINS[0]][name] -= {site.guid(DOMAINS[0], 0, 0)}
    site.observe_all()
    adoption = next(step for step in plan.steps if isinstance(step, AdoptPartition))
    operator.do(*plan.steps[: plan.steps.index(adoption)])
    with pytest.raises(Rejected, match="or has other GPUs than when it was planned"):
        operator.do(adoption)
    (outcome,) = operator.do(SettleDomain(domain=DOMAINS[0]))
    assert outcome.state is StepState.KEPT
    assert "create-partition rl-" in outcome.message
    assert site.read(intent.pause_reason, DOMAINS[0]) == PAUSE_REASON


def test_a_domain_stays_paused_where_the_policy_would_change_the_fabric(operator):
    """At a site without the factory default partition, the site would delete that of NICo."""
    site = operator.site
    site.partitions[DOMAINS[0]]["Default Partition"] = frozenset({site.guid(DOMAINS[0], 2, 3)})
    site.observe_all()
    outcomes = operator.do(*operator.plan().steps)
    assert "Default Partition" in outcomes[-2].message
    assert outcomes[-1].state is StepState.DONE


def test_a_pause_of_an_operator_stays(operator):
    site, plan = operator.site, operator.plan()
    site.run(intent.pause_domain, DOMAINS[0], OperatorOrder("operator", "looking", site.tick()))
    outcomes = operator.do(*plan.steps)
    assert outcomes[-2].message == "stays paused as before: looking"
    assert site.read(intent.pause_reason, DOMAINS[0]) == "looking"


def test_an_unreadable_domain_stays_paused(operator):
    site, plan = operator.site, operator.plan()
    operator.do(*plan.steps[:-2])
    site.lose(DOMAINS[0])
    (outcome,) = operator.do(SettleDomain(domain=DOMAINS[0]))
    assert (outcome.state, "unknown since" in outcome.message) == (StepState.KEPT, True)


def test_a_domain_whose_lists_contradict_themselves_stays_paused(operator):
    """Its plan is empty because nothing is known, not because nothing is to be done."""
    site, plan = operator.site, operator.plan()
    operator.do(*plan.steps[:-2])
    doubtful = frozenset({int(site.guid(DOMAINS[0], 2, 3))})
    reading = msgspec.structs.replace(site.observation(DOMAINS[0], at=site.tick()), uncertain=doubtful)
    site.run(records.record_observation, site.endpoint[DOMAINS[0]], reading, site.tick())
    (outcome,) = operator.do(SettleDomain(domain=DOMAINS[0]))
    assert (outcome.state, outcome.message) == (StepState.KEPT, f"stays paused: {UNCERTAIN_REASON}")
    site.observe_all()
    (outcome,) = operator.do(SettleDomain(domain=DOMAINS[0]))
    assert outcome.state is StepState.DONE


def test_a_record_that_somebody_else_created_meanwhile_is_neither_taken_nor_removed(operator):
    site, plan = operator.site, operator.plan()
    vpc = next(step for step in plan.steps if step.__struct_config__.tag == "vpc")
    operator.do(*plan.steps[: plan.steps.index(vpc)])
    tenant = next(step for step in plan.steps if step.__struct_config__.tag == "tenant")
    other = logical_partitions.NewVpc(site_id=site.site_id, name="other", id=vpc.id)
    site.run(logical_partitions.create_vpc, tenant.id, other, now=site.tick(), ids=site.ids)
    with pytest.raises(Rejected, match="no import created it"):
        operator.do(vpc)
    (outcome,) = operator.undo(vpc)
    assert outcome.state is StepState.ALREADY
    assert site.row(schema.vpc, vpc.id) is not None
    (kept,) = operator.undo(tenant)
    assert (kept.state, "VPCs" in kept.message) == (StepState.KEPT, True)


def test_a_tenant_with_quotas_of_the_site_is_kept(operator):
    site, plan = operator.site, operator.plan()
    operator.do(*plan.steps)
    tenant = next(step for step in plan.steps if step.__struct_config__.tag == "tenant")
    site.run(entitlements.set_quotas, tenant.id, {entitlements.QuotaKind.VPCS: 5}, site.tick())
    back = undoing(plan)
    outcome = operator.undo(*back)[back.index(tenant)]
    assert (outcome.state, "quotas" in outcome.message) == (StepState.KEPT, True)


def test_a_machine_that_is_taken_or_changed_since_the_plan_is_refused(operator):
    plan = operator.plan()
    step = next(step for step in plan.steps if isinstance(step, CreateInstance))
    operator.do(*plan.steps[: plan.steps.index(step)])
    other = (msgspec.structs.replace(step.interfaces[0], guid="7"), *step.interfaces[1:])
    with pytest.raises(Rejected, match="is another one now"):
        operator.do(msgspec.structs.replace(step, interfaces=other))
    operator.do(step)
    with pytest.raises(Rejected, match="carries instance"):
        operator.do(msgspec.structs.replace(step, id=uuid(5000), name="late"))


def test_a_partition_with_an_open_operation_is_not_given_up(operator):
    site, plan = operator.site, operator.plan()
    operator.do(*plan.steps)
    adoption = next(step for step in plan.steps if isinstance(step, AdoptPartition))
    joining = frozenset({int(adoption.guids[0])})
    site.begin_create(DOMAINS[0], adoption.logical_partition, adoption.name, joining)
    operator.do(PauseDomain(domain=DOMAINS[0]))
    with pytest.raises(Rejected, match="not confirmed by an observation"):
        operator.undo(adoption)
