"""The free room of a site, and the details of one GPU."""

import msgspec
import pytest
from markupsafe import escape
from tests.web.snapshots import AT, GPUS, examined, findings_on, snapshot

from rackloom.core.diagnosis.catalogue import Check
from rackloom.core.diagnosis.findings import Level, fails
from rackloom.core.diagnosis.index import places_around
from rackloom.core.diagnosis.snapshot import Layer, LayerStatus, PartitionRecord
from rackloom.web.chain import LayerReport, layer_reports
from rackloom.web.frames import ColourMode, MapColours, rack_frames
from rackloom.web.model import SiteReading, site_map
from rackloom.web.panels import FreeCapacity, rack_capacity, site_capacity
from rackloom.web.racks import drawn_rack
from rackloom.web.render import render_chain, render_findings, time_markup
from rackloom.web.tenancy import TenantRacks, tenant_map


def left(seen) -> FreeCapacity:
    return site_capacity([rack_capacity(rack) for rack in site_map(SiteReading(snapshot=seen)).racks])


def test_the_largest_gang_stays_within_one_domain():
    seen = snapshot(2, 3, ("acme", None, None, None, "acme", None))
    assert left(seen) == FreeCapacity(
        free_trays=4, unknown_trays=0, gang_trays=2, gang_gpus=2 * GPUS, stranded_gpus=0
    )


def test_a_cordoned_tray_is_not_free_and_a_full_site_has_no_room():
    seen = snapshot(1, 2, (None, "acme"))
    cordoned = tuple(msgspec.structs.replace(machine, cordoned=True) for machine in seen.machines)
    assert left(msgspec.structs.replace(seen, machines=cordoned)).free_trays == 0
    assert left(snapshot(1, 2, ("acme",))).gang_trays == 0


def test_an_empty_tray_in_a_foreign_partition_is_not_free_and_a_finding_counts_and_marks_it():
    seen = snapshot(1, 2, ("acme", None))
    partition = PartitionRecord(
        domain=seen.domains[0].uuid, id=7, name="theirs", healthy=True, owner="foreign"
    )
    empty = [machine.id for machine in seen.machines if machine.instance is None]
    slots = {(machine.chassis_serial, machine.slot) for machine in seen.machines if machine.id in empty[:1]}
    gpus = tuple(
        msgspec.structs.replace(gpu, partition=7)
        if (gpu.place.chassis_serial, gpu.place.slot) in slots
        else gpu
        for gpu in seen.fabric_gpus
    )
    held = msgspec.structs.replace(seen, fabric_gpus=gpus, partitions=(*seen.partitions, partition))
    before, after = left(seen), left(held)
    assert after.free_trays == before.free_trays - 1
    reading = examined(held)
    (found,) = (finding for finding in reading.findings if finding.check == Check.PARTITION_OWNED)
    assert f"it keeps instances off 1 empty tray: {empty[0]}" in found.message
    assert found.title == "Somebody else made partition theirs"
    (frame,) = rack_frames(site_map(reading)).values()
    cells = [tray.cells for tray in drawn_rack(frame, ColourMode.TENANT, MapColours()).trays]
    assert [{cell.level for cell in tray} for tray in cells].count({Level.CRITICAL}) == 1


def test_gpus_beside_a_pod_in_a_tray_that_no_instance_has_are_stranded():
    seen = snapshot(1, 1, ("acme",))
    free = tuple(msgspec.structs.replace(machine, instance=None, tenant=None) for machine in seen.machines)
    one_used = tuple(use for use in seen.uses if use.device == "gpu-0")
    assert left(msgspec.structs.replace(seen, machines=free, uses=one_used)).stranded_gpus == GPUS - 1


def test_trays_that_nobody_can_vouch_for_are_not_free():
    seen = snapshot(1, 2)
    lost = tuple(
        LayerStatus(layer=layer.layer, unknown_since=1.0) if layer.layer is Layer.SITE else layer
        for layer in seen.layers
    )
    found = left(msgspec.structs.replace(seen, layers=lost))
    assert (found.free_trays, found.unknown_trays) == (0, 2)


@pytest.mark.parametrize(
    "doubt", [{"unknown_since": AT - 9}, {"observed_at": None}], ids=["silent", "never read"]
)
def test_a_tray_whose_controllers_do_not_answer_is_not_free(doubt):
    seen = snapshot(2, 3, (None, None, "acme"))
    domains = (msgspec.structs.replace(seen.domains[0], **doubt), seen.domains[1])
    silent = msgspec.structs.replace(seen, domains=domains)
    found = left(silent)
    assert (found.free_trays, found.unknown_trays, found.gang_trays) == (2, 2, 2)
    assert left(msgspec.structs.replace(seen, domains=seen.domains[1:])) == found
    racks = [
        drawn_rack(frame, ColourMode.TENANT, MapColours())
        for frame in rack_frames(site_map(SiteReading(snapshot=silent))).values()
    ]
    assert [rack.free for rack in racks] == [None, 2]


def test_a_site_that_was_asked_of_no_fabric_has_the_room_that_its_cluster_tells_of():
    seen = snapshot(1, 2)
    layers = tuple(layer for layer in seen.layers if layer.layer is not Layer.FABRIC)
    bare = msgspec.structs.replace(seen, layers=layers, domains=(), fabric_gpus=(), machines=())
    assert left(bare).free_trays == 2


def reported(seen) -> dict[str, LayerReport]:
    whole = site_map(SiteReading(snapshot=seen))
    return {report.source: report for report in layer_reports(whole, whole.gpus[0])}


def values(layer_report: LayerReport) -> dict[str, str | None]:
    return {label: value for label, value, _ in layer_report.links}


def test_a_chain_names_every_link_with_who_says_so_and_when():
    seen = reported(snapshot(1, 1, ("acme",)))
    assert {who: (report.at, report.current) for who, report in seen.items()} == {
        "site records": (AT, True),
        "switch controller": (AT, True),
        "Kubernetes": (AT, True),
        "transfer record": (AT - 300, True),
    }
    assert values(seen["site records"]) == {
        "Tenant": "acme",
        "VPC": "acme-network",
        "Instance": "acme-machine-0-0-instance",
        "Machine": "acme-machine-0-0",
        "Asked into": "acme-lp-0",
        "Logical partition": "acme-training",
    }
    assert values(seen["switch controller"])["Place"].endswith(" slot 0 module 1")
    assert values(seen["Kubernetes"]) == {
        "GPU": "GPU-acme-0-0-1",
        "Clique": "domain-0.407",
        "Node": "acme-node-0-0",
        "Claim": "acme-ns/acme-gpus",
        "Pod": "acme-ns/acme-worker-acme-node-0-0",
        "ComputeDomain": "acme-ns/acme-domain",
        "Channel": "channel-7",
        "NIC": "rack-00/slot-0/nic-0",
    }
    assert values(seen["transfer record"]) == {"Last transfer": "46.2 GB/s by mlx5_0:1"}


def test_of_a_layer_that_was_not_read_nothing_is_said_to_be_absent():
    seen = snapshot(1, 1)
    layers = tuple(layer for layer in seen.layers if layer.layer is not Layer.CLUSTER)
    bare = msgspec.structs.replace(seen, layers=layers, nodes=(), devices=(), uses=())
    cluster = reported(bare)["Kubernetes"]
    assert not cluster.current
    whole = site_map(SiteReading(snapshot=bare))
    page = render_chain(whole.gpus[0], layer_reports(whole, whole.gpus[0]))
    row = page[page.index(">Claim<") :]
    assert row[: row.index("</tr>")].count("unknown") == 1


def test_a_silent_controller_tells_since_when():
    seen = snapshot(1, 1)
    silent = tuple(msgspec.structs.replace(domain, unknown_since=AT - 9) for domain in seen.domains)
    fabric = reported(msgspec.structs.replace(seen, domains=silent))["switch controller"]
    assert (fabric.at, fabric.unknown_since) == (AT, AT - 9)


def test_a_domain_that_is_in_doubt_says_why_to_operators_alone():
    seen = snapshot(1, 1, ("acme",))
    doubt = tuple(
        msgspec.structs.replace(domain, unknown_since=AT - 9, problem="A and B contradict")
        for domain in seen.domains
    )
    whole = site_map(examined(msgspec.structs.replace(seen, domains=doubt)))
    for shown, count in ((whole, 1), (tenant_map(whole, "acme", TenantRacks())[0], 0)):
        found = findings_on(shown, shown.gpus[0])
        page = render_chain(shown.gpus[0], layer_reports(shown, shown.gpus[0]), found)
        assert page.count("A and B contradict") == count
        assert page.count("unknown since") == 1


def test_a_domain_whose_controllers_nobody_speaks_to_any_more_was_not_read():
    seen = snapshot(2, 1, ("acme",))
    fewer = msgspec.structs.replace(
        seen,
        domains=seen.domains[1:],
        fabric_gpus=tuple(gpu for gpu in seen.fabric_gpus if gpu.domain != "domain-0"),
        partitions=tuple(partition for partition in seen.partitions if partition.domain != "domain-0"),
    )
    fabric = reported(fewer)["switch controller"]
    assert (fabric.at, fabric.unknown_since, fabric.current) == (None, None, False)
    assert values(fabric) == {"Partition": None, "Fabric GPU": None}
    layers = tuple(msgspec.structs.replace(layer, unknown_since=AT - 9) for layer in fewer.layers)
    lost = reported(msgspec.structs.replace(fewer, layers=layers))["switch controller"]
    assert (lost.at, lost.unknown_since) == (None, AT - 9)


def test_where_two_layers_contradict_each_other_both_are_quoted():
    seen = snapshot(1, 1)
    swapped = msgspec.structs.replace(
        seen,
        fabric_gpus=tuple(
            msgspec.structs.replace(gpu, guid=gpu.guid + (1 << 48)) for gpu in seen.fabric_gpus
        ),
    )
    whole = site_map(examined(swapped))
    quoted = [seat for seat in whole.gpus if seat.chain is not None and seat.chain.conflicts]
    assert len(quoted) == GPUS
    for seat in quoted:
        panel = render_chain(seat, layer_reports(whole, seat), findings_on(whole, seat))
        assert all(escape(conflict) in panel for conflict in seat.chain.conflicts)


def test_findings_say_of_which_moment_they_are():
    reading = SiteReading(snapshot=snapshot(1, 1, ("acme",)), findings=(), examined_at=AT - 7)
    whole = site_map(reading)
    assert f"as of {time_markup(AT - 7)}" in render_findings(whole, {})
    assert "as of" not in render_findings(tenant_map(whole, "acme", TenantRacks())[0], {})


def test_a_gpu_says_what_the_doctor_objects_to_there_and_what_follows_from_it():
    seen = snapshot(1, 2, ("acme",))
    chain = site_map(SiteReading(snapshot=seen)).gpus[0].chain
    broken = fails("CHECK", "<it>", "is broken", "mend it", where=places_around([chain])[:1])
    broken = msgspec.structs.replace(
        broken, consequences=("pod runs: team/one", "pod runs: team/two", "IMEX: <all>")
    )
    reading = SiteReading(snapshot=seen, findings=(broken,), examined_at=AT)
    whole = site_map(reading)
    here, elsewhere = whole.gpus[0], whole.gpus[-1]
    assert (findings_on(whole, here), findings_on(whole, elsewhere)) == ((broken,), ())
    panel = render_chain(here, layer_reports(whole, here), findings_on(whole, here))
    for markup in (panel, render_findings(whole, {})):
        assert "&lt;it&gt;: is broken" in markup
        assert "pod runs: team/one, team/two</li>" in markup
        assert "IMEX: &lt;all&gt;</li>" in markup
    assert "and therefore" not in render_chain(
        elsewhere, layer_reports(whole, elsewhere), findings_on(whole, elsewhere)
    )
    tenants = tenant_map(whole, "acme", TenantRacks())[0]
    assert findings_on(tenants, tenants.gpus[0]) == ()


def test_a_controller_that_lists_other_gpus_in_the_same_places_makes_no_room_and_takes_none():
    seen = snapshot(1, 3, ("acme", None, None))
    wrong = tuple(
        msgspec.structs.replace(gpu, domain="a-domain", guid=gpu.guid + 0xBAD0000) for gpu in seen.fabric_gpus
    )
    lied = msgspec.structs.replace(seen, fabric_gpus=(*wrong, *seen.fabric_gpus))
    assert left(lied) == left(seen)
    reported, honest = (site_map(SiteReading(snapshot=site)).gpus for site in (lied, seen))
    assert [seat.taken for seat in reported] == [seat.taken for seat in honest]
