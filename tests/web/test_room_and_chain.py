"""What is left of a site, and what is said of one GPU."""

import msgspec
import pytest
from tests.web.pictures import AT, GPUS, picture

from rackloom.prove.doctor.checks.view import around
from rackloom.prove.doctor.findings import fails
from rackloom.prove.picture.values import Layer, LayerSeen
from rackloom.web.colouring import Colours, Mode
from rackloom.web.details import Said, objections, said
from rackloom.web.frames import frames
from rackloom.web.racks import drawn_rack
from rackloom.web.reading import Reading
from rackloom.web.render import chain, findings, moment
from rackloom.web.room_left import RoomLeft, rack_room, room_left
from rackloom.web.scene import scene
from rackloom.web.tenancy import next_own


def left(seen) -> RoomLeft:
    return room_left([rack_room(one) for one in scene(Reading(picture=seen)).racks])


def test_the_largest_gang_stays_within_one_domain():
    seen = picture(2, 3, ("acme", None, None, None, "acme", None))
    assert left(seen) == RoomLeft(
        free_trays=4, unknown_trays=0, gang_trays=2, gang_gpus=2 * GPUS, stranded_gpus=0
    )


def test_a_cordoned_tray_is_not_free_and_a_full_site_has_no_room():
    seen = picture(1, 2, (None, "acme"))
    cordoned = tuple(msgspec.structs.replace(one, cordoned=True) for one in seen.machines)
    assert left(msgspec.structs.replace(seen, machines=cordoned)).free_trays == 0
    assert left(picture(1, 2, ("acme",))).gang_trays == 0


def test_gpus_beside_a_pod_in_a_tray_that_no_instance_has_are_stranded():
    seen = picture(1, 1, ("acme",))
    free = tuple(msgspec.structs.replace(one, instance=None, tenant=None) for one in seen.machines)
    one_used = tuple(use for use in seen.uses if use.device == "gpu-0")
    assert left(msgspec.structs.replace(seen, machines=free, uses=one_used)).stranded_gpus == GPUS - 1


def test_trays_that_nobody_can_vouch_for_are_not_free():
    seen = picture(1, 2)
    lost = tuple(
        LayerSeen(layer=one.layer, unknown_since=1.0) if one.layer is Layer.SITE else one
        for one in seen.layers
    )
    found = left(msgspec.structs.replace(seen, layers=lost))
    assert (found.free_trays, found.unknown_trays) == (0, 2)


@pytest.mark.parametrize(
    "doubt", [{"unknown_since": AT - 9}, {"observed_at": None}], ids=["silent", "never read"]
)
def test_a_tray_whose_controllers_do_not_answer_is_not_free(doubt):
    seen = picture(2, 3, (None, None, "acme"))
    domains = (msgspec.structs.replace(seen.domains[0], **doubt), seen.domains[1])
    silent = msgspec.structs.replace(seen, domains=domains)
    found = left(silent)
    assert (found.free_trays, found.unknown_trays, found.gang_trays) == (2, 2, 2)
    assert left(msgspec.structs.replace(seen, domains=seen.domains[1:])) == found
    racks = [
        drawn_rack(one, Mode.TENANT, Colours()) for one in frames(scene(Reading(picture=silent))).values()
    ]
    assert [rack.free for rack in racks] == [None, 2]


def test_a_site_that_was_asked_of_no_fabric_has_the_room_that_its_cluster_tells_of():
    seen = picture(1, 2)
    layers = tuple(one for one in seen.layers if one.layer is not Layer.FABRIC)
    bare = msgspec.structs.replace(seen, layers=layers, domains=(), fabric_gpus=(), machines=())
    assert left(bare).free_trays == 2


def told(seen) -> dict[str, Said]:
    whole = scene(Reading(picture=seen))
    return {one.who: one for one in said(whole, whole.seats[0])}


def values(one: Said) -> dict[str, str | None]:
    return {label: value for label, value, _ in one.links}


def test_a_chain_names_every_link_with_who_says_so_and_when():
    seen = told(picture(1, 1, ("acme",)))
    assert {who: (one.at, one.current) for who, one in seen.items()} == {
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
        "Asked into": "acme-lp",
        "Logical partition": "acme-training",
    }
    assert values(seen["Kubernetes"]) == {
        "GPU": "GPU-acme-0-0-1",
        "Clique": "domain-0.407",
        "Node": "acme-node-0-0",
        "Claim": "acme-ns/acme-gpus",
        "Pod": "acme-ns/acme-worker-acme-node-0-0",
        "ComputeDomain": "acme-ns/acme-domain",
        "Channel": "channel-7",
        "NIC": "acme-nic-0",
    }
    assert values(seen["transfer record"]) == {"Last transfer": "46.2 GB/s by mlx5_0:1"}


def test_of_a_layer_that_was_not_read_nothing_is_said_to_be_absent():
    seen = picture(1, 1)
    layers = tuple(one for one in seen.layers if one.layer is not Layer.CLUSTER)
    bare = msgspec.structs.replace(seen, layers=layers, nodes=(), devices=(), uses=())
    cluster = told(bare)["Kubernetes"]
    assert not cluster.current
    whole = scene(Reading(picture=bare))
    page = chain(whole.seats[0], said(whole, whole.seats[0]))
    row = page[page.index(">Claim<") :]
    assert row[: row.index("</tr>")].count("unknown") == 1


def test_a_silent_controller_tells_since_when():
    seen = picture(1, 1)
    silent = tuple(msgspec.structs.replace(one, unknown_since=AT - 9) for one in seen.domains)
    fabric = told(msgspec.structs.replace(seen, domains=silent))["switch controller"]
    assert (fabric.at, fabric.unknown_since) == (AT, AT - 9)


def test_a_domain_that_is_in_doubt_says_why_to_operators_alone():
    seen = picture(1, 1, ("acme",))
    doubt = tuple(
        msgspec.structs.replace(one, unknown_since=AT - 9, problem="A and B contradict")
        for one in seen.domains
    )
    whole = scene(Reading(picture=msgspec.structs.replace(seen, domains=doubt)))
    for shown, count in ((whole, 1), (next_own(whole, "acme", {})[0], 0)):
        page = chain(shown.seats[0], said(shown, shown.seats[0]))
        assert page.count("A and B contradict") == count
        assert page.count("unknown since") == 1


def test_a_domain_whose_controllers_nobody_speaks_to_any_more_was_not_read():
    seen = picture(2, 1, ("acme",))
    fewer = msgspec.structs.replace(
        seen,
        domains=seen.domains[1:],
        fabric_gpus=tuple(one for one in seen.fabric_gpus if one.domain != "domain-0"),
        partitions=tuple(one for one in seen.partitions if one.domain != "domain-0"),
    )
    fabric = told(fewer)["switch controller"]
    assert (fabric.at, fabric.unknown_since, fabric.current) == (None, None, False)
    assert values(fabric) == {"Partition": None, "Fabric GPU": None}
    layers = tuple(msgspec.structs.replace(one, unknown_since=AT - 9) for one in fewer.layers)
    lost = told(msgspec.structs.replace(fewer, layers=layers))["switch controller"]
    assert (lost.at, lost.unknown_since) == (None, AT - 9)


def test_where_two_layers_contradict_each_other_both_are_quoted():
    seen = picture(1, 1)
    swapped = msgspec.structs.replace(
        seen,
        fabric_gpus=tuple(
            msgspec.structs.replace(one, guid=one.guid + (1 << 48)) for one in seen.fabric_gpus
        ),
    )
    whole = scene(Reading(picture=swapped))
    quoted = [seat for seat in whole.seats if seat.chain is not None and seat.chain.conflicts]
    assert len(quoted) == GPUS
    assert all('class="trouble"' in chain(seat, said(whole, seat)) for seat in quoted)


def test_findings_say_of_which_moment_they_are():
    reading = Reading(picture=picture(1, 1, ("acme",)), findings=(), examined_at=AT - 7)
    whole = scene(reading)
    assert f"as of {moment(AT - 7)}" in findings(whole, {})
    assert "as of" not in findings(next_own(whole, "acme", {})[0], {})


def test_a_gpu_says_what_the_doctor_objects_to_there_and_what_follows_from_it():
    seen = picture(1, 2, ("acme",))
    here, elsewhere = scene(Reading(picture=seen)).seats[0], scene(Reading(picture=seen)).seats[-1]
    broken = fails("CHECK", "<it>", "is broken", "mend it", where=around([here.chain])[:1])
    broken = msgspec.structs.replace(
        broken, consequences=("pod runs: team/one", "pod runs: team/two", "IMEX: <all>")
    )
    reading = Reading(picture=seen, findings=(broken,), examined_at=AT)
    whole = scene(reading)
    assert (objections(whole, here), objections(whole, elsewhere)) == ((broken,), ())
    panel = chain(here, said(whole, here), objections(whole, here))
    for markup in (panel, findings(whole, {})):
        assert "&lt;it&gt;: is broken" in markup
        assert "pod runs: team/one, team/two</li>" in markup
        assert "IMEX: &lt;all&gt;</li>" in markup
    assert "and therefore" not in chain(elsewhere, said(whole, elsewhere), objections(whole, elsewhere))
    tenants = next_own(whole, "acme", {})[0]
    assert objections(tenants, tenants.seats[0]) == ()


def test_a_controller_that_lists_other_gpus_in_the_same_places_makes_no_room_and_takes_none():
    seen = picture(1, 3, ("acme", None, None))
    wrong = tuple(
        msgspec.structs.replace(one, domain="a-domain", guid=one.guid + 0xBAD0000) for one in seen.fabric_gpus
    )
    lied = msgspec.structs.replace(seen, fabric_gpus=(*wrong, *seen.fabric_gpus))
    assert left(lied) == left(seen)
    told, honest = (scene(Reading(picture=one)).seats for one in (lied, seen))
    assert [seat.taken for seat in told] == [seat.taken for seat in honest]
