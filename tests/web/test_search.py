"""A part of any name leads to its place on the map, and no viewer finds objects that it may not see."""

import time

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.web.snapshots import snapshot
from tests.web.test_pages_served import sign_in, visit
from tests.web.test_what_tenants_see import HOLDERS, MINE, THEIRS, reading, seen_by

from rackloom.core.diagnosis.snapshot import Layer
from rackloom.web.frames import ColourMode
from rackloom.web.model import SiteReading, site_map
from rackloom.web.racks import find_gpu, rack_id
from rackloom.web.render import render_found
from rackloom.web.search import LONGEST_QUERY, MOST_RESULTS, search, update_index
from rackloom.web.view import gpu_address

SEEN = snapshot(12, 3, ("acme", None, "blue"))
WHOLE = site_map(SiteReading(snapshot=SEEN))


def finds(query, whole=WHOLE):
    return search(update_index(whole, {}), query)


def first(query, whole=WHOLE):
    found = finds(query, whole)[0]
    return found.kind, found.name


@pytest.mark.parametrize(
    ("query", "kind", "name"),
    [
        ("rack-07", "rack", "rack-07"),
        ("RACK-07  slot 2", "tray", "rack-07/slot-2"),
        ("tray rack-07/slot-2", "tray", "rack-07/slot-2"),
        ("gpu 3 of rack-07 slot 0", "GPU", "rack-07/slot-0/gpu-2"),
        ("rack-07/slot-0/GPU-2", "GPU", "rack-07/slot-0/gpu-2"),
        ("rack-07/slot-0/nic-2", "NIC", "rack-07/slot-0/nic-2"),
        ("rack-07/switch-3/port-17", "rack", "rack-07"),
        ("GPU-acme-7-0-3", "GPU", "GPU-acme-7-0-3"),
        ("0x0000000700000003", "GPU", "0x0000000700000003"),
        ("acme-node-7-0", "node", "acme-node-7-0"),
        ("node acme-node-7-0", "node", "acme-node-7-0"),
        ("acme-machine-7-0", "machine", "acme-machine-7-0"),
        ("acme-machine-7-0-inst", "instance", "acme-machine-7-0-instance"),
        ("blue", "tenant", "blue"),
        ("tenant blue", "tenant", "blue"),
        ("blue-network", "VPC", "blue-network"),
        ("blue-7-nvl", "partition", "blue-7-nvl"),
        ("acme-training", "logical partition", "acme-training"),
        ("domain-7", "domain", "domain-7"),
        ("acme-domain", "ComputeDomain", "acme-ns/acme-domain"),
        ("acme-job", "job", "Job acme-ns/acme-job"),
        ("pod acme-ns/acme-worker-acme-node-7-0", "pod", "acme-ns/acme-worker-acme-node-7-0"),
        ("acme-gpus", "claim", "acme-ns/acme-gpus"),
        ("acme-node-7-0/gpu-2", "device", "acme-node-7-0/gpu-2"),
        ("acme-node-7-0/acme-nic-2", "NIC", "acme-node-7-0/acme-nic-2"),
        ("0000:03:00.0 of acme-node-7-0", "PCI address", "0000:03:00.0 of acme-node-7-0"),
    ],
)  # fmt: skip
def test_anything_is_found_by_its_name(query, kind, name):
    assert first(query) == (kind, name)


def test_a_switch_controller_is_found_by_its_address_by_operators_alone():
    domains = tuple(
        msgspec.structs.replace(d, endpoints=(f"https://switch-{d.uuid}:9370",)) for d in SEEN.domains
    )
    whole = site_map(SiteReading(snapshot=msgspec.structs.replace(SEEN, domains=domains)))
    (found,) = finds("switch-domain-7:", whole)
    assert (found.kind, found.rack) == ("switch controller", "rack-07")
    assert finds("switch-domain-7:", seen_by(whole, "acme")) == ()
    assert finds("domain-7", seen_by(whole, "acme"))[0].kind == "clique"


def test_a_result_leads_to_a_gpu_of_what_was_found():
    (node,) = finds("blue-node-7-2")[:1]
    gpu = find_gpu(WHOLE, gpu_address(node.gpu))
    assert gpu.chain.node.name == "blue-node-7-2"
    (rack,) = finds("rack-07")[:1]
    assert (rack.rack, rack.gpu) == ("rack-07", "")
    markup = render_found(ColourMode.USE, "x", [node, rack])
    assert f'href="?by=use&amp;gpu={node.gpu}#{node.gpu}"' in markup
    assert f'href="?by=use&amp;rack=rack-07#{rack_id("rack-07")}"' in markup


def test_what_is_in_several_racks_is_one_result():
    (found,) = (result for result in finds("blue") if result.kind == "tenant")
    assert (found.rack, found.more_racks) == ("rack-00", 11)


def test_whole_names_come_before_beginnings_and_these_before_parts():
    assert [result.name for result in finds("rack-1")][:2] == ["rack-10", "rack-11"]
    assert finds("e-node-7-2")[0].name == "blue-node-7-2"


@pytest.mark.parametrize("query", ["", "   ", "\t\n", "nothing of this name", "x" * 5000])
def test_what_is_not_there_is_not_found(query):
    assert finds(query) == ()


def test_few_results_of_many_and_a_long_query_is_cut():
    assert len(finds("gpu")) == MOST_RESULTS
    assert finds("rack-07" + " " * LONGEST_QUERY + "nothing")[0].name == "rack-07"


@settings(max_examples=40)
@given(
    holders=HOLDERS,
    query=st.sampled_from([THEIRS, THEIRS[:2], "node", "gpu", "pod", "", "-", "0x", "job", "a"]),
)
def test_no_tenant_finds_what_is_anothers(holders, query):
    own = seen_by(site_map(reading(holders, MINE in holders and THEIRS in holders)), MINE)
    index = update_index(own, {})
    assert all(THEIRS not in text for _, names in index.values() for text in (*names.folded, *names.written))
    assert all(THEIRS not in result.name for result in search(index, query))


@given(holders=HOLDERS)
def test_a_tenant_finds_what_is_its_own(holders):
    own = seen_by(site_map(SiteReading(snapshot=snapshot(2, 3, holders))), MINE)
    for name, kind in ((MINE, "tenant"), (f"{MINE}-job", "job"), (f"{MINE}-node", "node")):
        assert [result.kind for result in finds(name, own)][:1] == [kind] * (MINE in holders)


def test_a_pod_that_is_hidden_from_a_tenant_is_not_found_nor_its_job():
    seen = msgspec.structs.replace(snapshot(1, 1, ("acme",)), namespaces={})
    own = seen_by(site_map(SiteReading(snapshot=seen)), "acme")
    assert finds("acme-worker", own) == finds("acme-job", own) == ()
    assert finds("acme-node", own)


def test_a_rack_that_did_not_change_keeps_its_names():
    before = update_index(WHOLE, {})
    layers = tuple(msgspec.structs.replace(layer, at=SEEN.at + 1) for layer in SEEN.layers)
    gpus = (msgspec.structs.replace(SEEN.fabric_gpus[0], healthy=False), *SEEN.fabric_gpus[1:])
    later = msgspec.structs.replace(SEEN, at=SEEN.at + 1, layers=layers, fabric_gpus=gpus)
    after = update_index(site_map(SiteReading(snapshot=later)), before)
    assert [name for name in after if after[name] is not before[name]] == ["rack-00"]
    assert {layer.layer for layer in layers} == set(Layer)


def test_names_do_not_become_markup():
    machines = tuple(msgspec.structs.replace(m, rack="<b>&\t\"r'") for m in SEEN.machines[:3])
    whole = site_map(SiteReading(snapshot=msgspec.structs.replace(SEEN, machines=machines)))
    found = finds("<b>&", whole)
    assert found[0].kind == "rack"
    assert "&lt;b&gt;&amp;" in render_found(ColourMode.USE, "<b>&", found)
    assert "<b>&" not in render_found(ColourMode.USE, "<b>&", found).replace("<b>&lt;", "")
    assert "<i>&" not in render_found(ColourMode.USE, "<i>&", ())


def test_a_search_of_a_thousand_racks_is_quick():
    index = update_index(site_map(SiteReading(snapshot=snapshot(100, 18, ("acme", "blue", None)))), {})
    for query in ("nothing of this name", "blue", "GPU-acme-99", "e"):
        begun = time.process_time()
        search(index, query)
        # A tenth of 0.2 s for a thousand racks.
        assert time.process_time() - begun < 0.2, query


def test_the_server_answers_a_viewer_over_its_own_part_only():
    async def scenario(client, _):
        stranger = await client.get("/map/search", params={"find": "blue"})
        await sign_in(client)
        operator = (await client.get("/map/search", params={"find": "blue-node"})).text
        page = (await client.get("/", params={"find": "blue-node"})).text
        await sign_in(client, org="acme", token="acme-token")
        tenant = (await client.get("/map/search", params={"find": "blue"})).text
        own = (await client.get("/map/search", params={"find": "acme-node"})).text
        empty = (await client.get("/map/search")).text
        return stranger.status_code, operator, page, tenant, own, empty

    stranger, operator, page, tenant, own, empty = visit(scenario)
    assert stranger == 401
    assert operator.count('role="option"') == MOST_RESULTS
    assert "blue-node-1-2" in operator
    assert "blue-node-1-2" in page
    assert "<a " not in tenant
    assert "called blue" in tenant
    assert "acme-node-0-0" in own
    assert empty.strip() == ""


@pytest.mark.parametrize(
    "name",
    [
        "rack-01/slot-0/gpu-2",
        "GPU 3 of rack-01 slot 0",
        "GPU-acme-1-0-3",
        "0x0000000100000003",
        str(0x0000000100000003).zfill(17),
        "00000000:03:00.0 of acme-node-1-0",
        "acme-node-1-0/gpu-2",
        "rack-01/slot-0/nic-2",
    ],
)
def test_an_address_may_name_a_gpu_in_every_form(name):
    async def scenario(client, _):
        await sign_in(client)
        moved = await client.get("/", params={"gpu": name})
        shown = await client.get("/" + moved.headers["location"].partition("#")[0])
        return moved.status_code, shown.text

    status, shown = visit(scenario)
    assert status == 303
    assert "<h3>rack-01/slot-0/gpu-2</h3>" in shown


@pytest.mark.parametrize("name", ["0000:03:00.0", "rack-01", "acme-node"])
def test_an_address_with_a_name_of_several_leads_to_a_search(name):
    async def scenario(client, _):
        await sign_in(client)
        return await client.get("/", params={"gpu": name}), await client.get("/", params={"find": name})

    moved, found = visit(scenario)
    assert (moved.status_code, moved.headers["location"].partition("=")[0]) == (303, "?find")
    assert found.text.count('role="option"') > 1
