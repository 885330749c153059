"""A tenant's page holds nothing of another tenant's, no matter what the layers report."""

from unittest.mock import patch

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.web.snapshots import AT, findings_on, snapshot

from rackloom.core.diagnosis.findings import fails
from rackloom.core.diagnosis.incremental import JoinedShares, join_shares
from rackloom.core.diagnosis.index import places_around
from rackloom.core.diagnosis.snapshot import Layer, LayerStatus
from rackloom.web import painters
from rackloom.web.chain import layer_reports
from rackloom.web.frames import ColourMode, GpuState
from rackloom.web.live import LiveReading
from rackloom.web.model import SiteReading, TimelineEntry, site_map
from rackloom.web.painters import Painter
from rackloom.web.panels import rack_capacity, site_capacity
from rackloom.web.render import render_chain
from rackloom.web.tenancy import TenantRacks, tenant_map

MINE, THEIRS = "zulu", "xray"
"""Names that occur in no template."""
HOLDERS = st.lists(st.sampled_from([MINE, THEIRS, None]), min_size=1, max_size=6).map(tuple)


def reading(holders, swapped=False):
    seen = snapshot(2, 3, holders)
    if swapped:
        # A fault: each one's GPUs are in the other's partition.
        other = {f"{MINE}-lp-0": f"{THEIRS}-lp-0", f"{THEIRS}-lp-0": f"{MINE}-lp-0"}
        other |= {f"{MINE}-lp-1": f"{THEIRS}-lp-1", f"{THEIRS}-lp-1": f"{MINE}-lp-1"}
        moved = tuple(
            msgspec.structs.replace(partition, logical=other[str(partition.logical)])
            for partition in seen.partitions
        )
        seen = msgspec.structs.replace(seen, partitions=moved)
    found = fails(
        "check", f"node {THEIRS}-node-0-0", f"{THEIRS} is wrong", f"fix {THEIRS}", evidence=(THEIRS,),
        where=tuple(places_around(join_shares(seen, JoinedShares()).chains)),
    )  # fmt: skip
    found = msgspec.structs.replace(found, consequences=(f"check: {THEIRS}",))
    happened = TimelineEntry(
        at=AT, tenant=THEIRS, what=f"made {THEIRS}", where=THEIRS, places=found.where, outcome="done"
    )
    # One of the tenant's own may be of a partition that others have GPUs in too.
    own = msgspec.structs.replace(happened, tenant=MINE, what="made mine", where="mine")
    return SiteReading(snapshot=seen, findings=(found,), happenings=(happened, own))


def seen_by(whole, org):
    return tenant_map(whole, org, TenantRacks())[0]


def shown(whole, org, mode):
    """Everything that a viewer can get: the page, and the chain of each GPU."""
    now = LiveReading(number=1, whole=whole)
    sheet = Painter(org, mode, 9).follow(now)
    with patch.object(painters, "WHOLE_RACKS", 0):
        large = Painter(org, mode, 9).follow(now)
    assert large.cells
    page = "".join(markup for drawn in (sheet, large) for _, markup in drawn.all())
    return page + "".join(
        render_chain(seat, layer_reports(sheet.whole, seat), findings_on(sheet.whole, seat))
        for seat in sheet.whole.gpus
    )


@settings(max_examples=40)
@given(holders=HOLDERS, mode=st.sampled_from(ColourMode), swapped=st.booleans())
def test_no_word_of_another_tenant_is_sent(holders, mode, swapped):
    whole = site_map(reading(holders, swapped and MINE in holders and THEIRS in holders))
    assert THEIRS not in shown(whole, MINE, mode)


@given(holders=HOLDERS)
def test_a_tenant_sees_all_that_is_its_own(holders):
    own = seen_by(site_map(SiteReading(snapshot=snapshot(2, 3, holders))), MINE)
    mine = [seat for seat in own.gpus if seat.chain is not None]
    assert {seat.chain.machine.tenant for seat in mine if seat.chain and seat.chain.machine} <= {f"{MINE}-id"}
    assert len(mine) == sum(holders[n % len(holders)] == MINE for n in range(6)) * 4
    if mine:
        assert f"{MINE}-worker" in shown(
            site_map(SiteReading(snapshot=snapshot(2, 3, holders))), MINE, ColourMode.WORKLOAD
        )


@given(holders=HOLDERS)
def test_the_rest_is_drawn_as_in_use_or_free(holders):
    whole = site_map(SiteReading(snapshot=snapshot(2, 3, holders)))
    assert [(s.place, s.taken) for s in seen_by(whole, MINE).gpus] == [(s.place, s.taken) for s in whole.gpus]


def test_operators_see_everything():
    page = shown(site_map(reading((MINE, THEIRS))), None, ColourMode.TENANT)
    assert MINE in page
    assert f"fix {THEIRS}" in page


def test_an_organisation_without_a_tenant_owns_nothing():
    own = seen_by(site_map(reading((THEIRS, None))), "nobody")
    assert all(seat.chain is None for seat in own.gpus)


def test_a_compute_domain_over_two_tenants_is_nobodys():
    seen = snapshot(1, 2, (MINE, THEIRS))
    compute_domain = seen.compute_domains[0]
    nodes = tuple(node for domain in seen.compute_domains for node in domain.status.nodes)
    wide = msgspec.structs.replace(
        compute_domain, name="shared", status=msgspec.structs.replace(compute_domain.status, nodes=nodes)
    )
    own = seen_by(
        site_map(SiteReading(snapshot=msgspec.structs.replace(seen, compute_domains=(wide,)))), MINE
    )
    assert own.compute_domains == ()
    assert all(seat.chain.compute_domain is None for seat in own.gpus if seat.chain)


def test_a_compute_domain_of_another_that_a_claim_of_the_tenants_own_names_is_not_named():
    seen, was = snapshot(1, 1, (MINE,)), snapshot(1, 1, (THEIRS,))
    theirs = tuple(
        msgspec.structs.replace(domain, status=seen.compute_domains[0].status)
        for domain in was.compute_domains
    )
    claims = tuple(msgspec.structs.replace(claim, domain=theirs[0].uid) for claim in seen.claims)
    reported = {**seen.namespaces, **was.namespaces}
    seen = msgspec.structs.replace(seen, claims=claims, compute_domains=theirs, namespaces=reported)
    whole = site_map(SiteReading(snapshot=seen))
    for mode in ColourMode:
        assert f"{THEIRS}-domain" in shown(whole, None, mode)
        assert THEIRS not in shown(whole, MINE, mode)
    own = [seat.chain for seat in seen_by(whole, MINE).gpus if seat.chain]
    assert {(chain.use.claim, chain.compute_domain, chain.channel) for chain in own} == {
        (f"{MINE}-ns/{MINE}-gpus", None, None)
    }


@pytest.mark.parametrize("sick", [{"cordoned": True}, {"health": "no power"}])
def test_a_tenant_has_no_more_room_left_than_there_is(sick):
    seen = snapshot(1, 3, (MINE, None, None))
    machines = (*seen.machines[:-1], msgspec.structs.replace(seen.machines[-1], **sick))
    whole = site_map(SiteReading(snapshot=msgspec.structs.replace(seen, machines=machines)))
    assert left(seen_by(whole, MINE)) == left(whole)
    assert left(whole).free_trays == 1


@pytest.mark.parametrize("owner", [MINE, THEIRS])
def test_a_reserved_tray_is_free_for_its_owner_only_and_operators_read_whose_it_is(owner):
    seen = snapshot(1, 3, (MINE, None, None))
    tenants = {org: tenant for tenant, org in {**seen.tenants, "their id": THEIRS}.items()}
    kept = {"reserved_for": tenants[owner], "reservation": f"reserved for {owner} until tomorrow"}
    machines = (*seen.machines[:-1], msgspec.structs.replace(seen.machines[-1], **kept))
    whole = site_map(SiteReading(snapshot=msgspec.structs.replace(seen, machines=machines)))
    assert left(whole).free_trays == 1
    assert left(seen_by(whole, MINE)).free_trays == (2 if owner == MINE else 1)
    assert f"reserved for {owner}" in shown(whole, None, ColourMode.TENANT)
    assert "reserved for" not in shown(whole, MINE, ColourMode.TENANT)
    assert "reserved for" not in repr(seen_by(whole, MINE))


@pytest.mark.parametrize("closed", [{"paused": True}, {"disputed": True, "unknown_since": AT}])
def test_there_is_no_room_in_a_domain_where_nothing_is_given_away(closed):
    seen = snapshot(2, 3, (MINE, None, None))
    domains = (msgspec.structs.replace(seen.domains[0], **closed), seen.domains[1])
    whole = site_map(SiteReading(snapshot=msgspec.structs.replace(seen, domains=domains)))
    assert left(seen_by(whole, MINE)) == left(whole)
    assert (left(whole).free_trays, left(whole).gang_trays) == (2, 2)


def left(whole):
    return site_capacity([rack_capacity(rack) for rack in whole.racks])


def test_trays_that_only_the_cluster_knows_stay_apart_and_unnamed():
    seen = snapshot(1, 12, (THEIRS,))
    whole = site_map(SiteReading(snapshot=msgspec.structs.replace(seen, machines=(), fabric_gpus=())))
    own = seen_by(whole, MINE)
    assert [len(tray) for rack in own.racks for tray in rack.trays] == [4] * 12
    order = [(seat.place.rack, seat.place.tray, seat.place.name.gpu) for seat in own.gpus]
    assert order == sorted(order)
    assert THEIRS not in repr(own)


def handed_over(since, cluster_at):
    """A machine that the other tenant just gave up. The cluster and the transfers still show that tenant."""
    seen = snapshot(1, 1, (THEIRS,))
    mine = snapshot(1, 1, (MINE,))
    lost = LayerStatus(layer=Layer.CLUSTER, at=cluster_at, unknown_since=AT)
    wanted = tuple(msgspec.structs.replace(gpu, since=since) for gpu in mine.instance_gpus)
    return msgspec.structs.replace(
        seen,
        layers=(*(layer for layer in seen.layers if layer.layer is not Layer.CLUSTER), lost),
        machines=mine.machines,
        instance_gpus=wanted,
        logicals=mine.logicals,
        tenants={**seen.tenants, **mine.tenants},
    )


@pytest.mark.parametrize("since", [AT - 60, None])
def test_what_was_seen_before_the_machine_was_the_tenants_is_not_shown(since):
    own = seen_by(site_map(SiteReading(snapshot=handed_over(since, AT - 90))), MINE)
    chains = [seat.chain for seat in own.gpus if seat.chain is not None]
    assert len(chains) == 4
    assert {(chain.use, chain.compute_domain, chain.channel, chain.transfer) for chain in chains} == {
        (None,) * 4
    }
    assert own.compute_domains == ()


def test_what_was_seen_since_the_machine_is_the_tenants_is_shown():
    seen = snapshot(1, 1, (MINE,))
    later = tuple(msgspec.structs.replace(transfer, at=AT - 5) for transfer in seen.transfers)
    own = seen_by(site_map(SiteReading(snapshot=msgspec.structs.replace(seen, transfers=later))), MINE)
    chains = [seat.chain for seat in own.gpus if seat.chain is not None]
    assert all(chain.use and chain.compute_domain and chain.channel for chain in chains)
    assert [chain.transfer.at for chain in chains if chain.transfer] == [AT - 5]


@pytest.mark.parametrize("since", [AT - 61, None])
def test_a_pod_that_began_before_the_machine_was_the_tenants_is_not_shown_though_the_cluster_lists_it(since):
    seen = snapshot(1, 1, (MINE,))
    before = tuple(msgspec.structs.replace(use, since=since) for use in seen.uses)
    whole = site_map(SiteReading(snapshot=msgspec.structs.replace(seen, uses=before)))
    reported = seen_by(whole, MINE)
    assert reported.compute_domains == ()
    own = [seat.chain for seat in reported.gpus if seat.chain is not None]
    assert {kept_back(chain) for chain in own} == {True}
    assert all(seat.chain.use.pods for seat in whole.gpus if seat.chain)


def kept_back(chain):
    """Whether the page shows that a GPU is in use, but not by whom."""
    return (chain.use.claim, chain.use.pods, chain.compute_domain, chain.channel) == ("", (), None, None)


@pytest.mark.parametrize("namespaces", [{}, {f"{MINE}-ns": THEIRS}, {f"{THEIRS}-ns": MINE}])
def test_a_pod_of_a_namespace_that_is_not_the_tenants_is_not_shown_whenever_it_began(namespaces):
    seen = msgspec.structs.replace(snapshot(1, 1, (MINE,)), namespaces=namespaces)
    reported = seen_by(site_map(SiteReading(snapshot=seen)), MINE)
    assert {kept_back(seat.chain) for seat in reported.gpus if seat.chain} == {True}
    assert (reported.compute_domains, reported.namespaces) == ((), {})


def test_a_pod_that_the_controller_of_the_tenant_before_starts_again_is_not_named():
    seen, was = snapshot(1, 1, (MINE,)), snapshot(1, 1, (THEIRS,))
    there = tuple(
        msgspec.structs.replace(domain, status=seen.compute_domains[0].status)
        for domain in was.compute_domains
    )
    again = tuple(
        msgspec.structs.replace(use, claim=old.claim, pods=old.pods, since=AT - 1)
        for use, old in zip(seen.uses, was.uses, strict=True)
    )
    seen = msgspec.structs.replace(seen, uses=again, claims=was.claims, compute_domains=there)
    whole = site_map(SiteReading(snapshot=seen))
    for mode in ColourMode:
        assert f"{THEIRS}-worker" in shown(whole, None, mode)
        assert THEIRS not in shown(whole, MINE, mode)
    sheet = Painter(MINE, ColourMode.WORKLOAD, 9).follow(LiveReading(number=1, whole=whole))
    cells = [cell for part in sheet.racks.values() for tray in part.drawn.trays for cell in tray.cells]
    assert {(cell.state, cell.busy) for cell in cells} == {(GpuState.UNKNOWN, True)}
    page = next(
        render_chain(seat, layer_reports(sheet.whole, seat)) for seat in sheet.whole.gpus if seat.chain
    )
    for label in ("Claim", "Pod", "ComputeDomain", "Channel"):
        assert row(page, label) == "<td><i>not shown</i></td>"


def test_a_pod_on_a_machine_of_which_nobody_knows_since_when_it_is_held_is_not_shown():
    seen = snapshot(1, 1, (MINE,))
    machines = tuple(msgspec.structs.replace(machine, held_since=None) for machine in seen.machines)
    own = seen_by(site_map(SiteReading(snapshot=msgspec.structs.replace(seen, machines=machines))), MINE)
    assert all(seat.chain is not None and kept_back(seat.chain) for seat in own.gpus)


@pytest.mark.parametrize(
    "change", [{"logical": None, "owner": "default", "default": True}, {"logical": f"{THEIRS}-lp"}]
)
def test_a_gpu_in_a_partition_that_is_not_the_tenants_is_not_called_free(change):
    seen = snapshot(1, 2, (MINE, THEIRS))
    other = tuple(msgspec.structs.replace(partition, **change) for partition in seen.partitions)
    whole = site_map(SiteReading(snapshot=msgspec.structs.replace(seen, partitions=other)))
    sheet = Painter(MINE, ColourMode.PARTITION, 9).follow(LiveReading(number=1, whole=whole))
    cells = [tray.cells for part in sheet.racks.values() for tray in part.drawn.trays]
    assert [{cell.state for cell in tray} for tray in cells] == [{GpuState.OTHERS}, {GpuState.UNKNOWN}]
    page = next(
        render_chain(seat, layer_reports(sheet.whole, seat)) for seat in sheet.whole.gpus if seat.chain
    )
    assert {name: row(page, name) for name in ("Partition", "Logical partition")} == {
        "Partition": "<td><i>not shown</i></td>",
        "Logical partition": "<td><i>not shown</i></td>",
    }


@pytest.mark.parametrize(
    ("doubt", "reported"),
    [
        ({"unknown_since": AT - 5, "disputed": True}, "contradict one another"),
        ({"unknown_since": AT - 5}, "cannot be read"),
        ({"observed_at": None}, "cannot be read"),
        ({}, "cannot be read"),
    ],
)
def test_a_tenant_reads_that_its_domain_is_not_known_and_neither_addresses_nor_other_domains(doubt, reported):
    seen = snapshot(1, 1, (MINE,))
    why = f"unknown since then: https://{THEIRS}-switch:9370 of domain {THEIRS}-uuid lists the same GPUs"
    asked = tuple(msgspec.structs.replace(gpu, status="Pending", problem=why) for gpu in seen.instance_gpus)
    domains = (msgspec.structs.replace(seen.domains[0], problem=why, **doubt),)
    whole = site_map(
        SiteReading(snapshot=msgspec.structs.replace(seen, instance_gpus=asked, domains=domains))
    )
    assert why in shown(whole, None, ColourMode.TENANT)
    page = shown(whole, MINE, ColourMode.TENANT)
    assert THEIRS not in page
    assert "://" not in row(page, "Asked into")
    assert reported in row(page, "Asked into")


def test_what_else_keeps_a_gpu_from_joining_a_tenant_reads():
    seen = snapshot(1, 1, (MINE,))
    why = "the GPU is still in partition 7"
    asked = tuple(msgspec.structs.replace(gpu, status="Pending", problem=why) for gpu in seen.instance_gpus)
    page = shown(
        site_map(SiteReading(snapshot=msgspec.structs.replace(seen, instance_gpus=asked))),
        MINE,
        ColourMode.TENANT,
    )
    assert why in row(page, "Asked into")


def row(page, label):
    """The value beside a label."""
    rest = page[page.index(f">{label}</th>") :]
    return rest[rest.index("<td>") : rest.index("</tr>")]
