"""The exported table of GPUs holds only rows that the viewer may see, rack by rack, and no formula."""

import csv
import io

import msgspec
from hypothesis import given
from hypothesis import strategies as st
from tests.web.snapshots import examined, snapshot
from tests.web.test_pages_served import sign_in, visit
from tests.web.test_what_tenants_see import HOLDERS, MINE, THEIRS, reading, seen_by

from rackloom.web.export import HEADINGS, gpu_table
from rackloom.web.model import site_map
from rackloom.web.racks import rack_id

SEEN = snapshot(2, 3, ("acme", None, "blue"))


def rows_of(whole, opened=()):
    return list(csv.DictReader(io.StringIO("".join(gpu_table(whole, opened)))))


# A new user has all GPUs in a spreadsheet after a click on CSV.
def test_each_gpu_is_a_row_with_its_chain():
    rows = rows_of(site_map(examined(SEEN)))
    assert len(rows) == 2 * 3 * 4
    (row,) = (row for row in rows if row["gpu_uuid"] == "GPU-acme-1-0-3")
    assert tuple(row) == HEADINGS
    assert row == {
        "rack": "rack-01", "slot": "0", "gpu": "2", "name": "rack-01/slot-0/gpu-2", "use": "in use",
        "health": "healthy",
        "gpu_uuid": "GPU-acme-1-0-3", "fabric_guid": "0x0000000100000003", "node": "acme-node-1-0",
        "machine": "acme-machine-1-0", "instance": "acme-machine-1-0-instance", "tenant": "acme",
        "partition": "acme-1-nvl", "clique": row["clique"], "claim": "acme-ns/acme-gpus",
        "pods": "acme-ns/acme-worker-acme-node-1-0", "jobs": "Job acme-ns/acme-job", "nics": "acme-nic-2",
    }  # fmt: skip


def test_only_opened_racks_are_exported_where_some_are():
    rows = rows_of(site_map(examined(SEEN)), {rack_id("rack-01")})
    assert {row["rack"] for row in rows} == {"rack-01"}


@given(holders=HOLDERS, swapped=st.booleans())
def test_a_tenants_table_has_no_word_of_another(holders, swapped):
    own = seen_by(site_map(reading(holders, swapped and MINE in holders and THEIRS in holders)), MINE)
    assert THEIRS not in "".join(gpu_table(own, ()))
    assert len(rows_of(own)) == 24


def test_no_cell_is_a_formula_in_a_spreadsheet():
    machines = tuple(msgspec.structs.replace(m, rack=f"={m.rack}") for m in SEEN.machines)
    rows = rows_of(site_map(examined(msgspec.structs.replace(SEEN, machines=machines))))
    assert {row["rack"] for row in rows} == {"'=rack-00", "'=rack-01"}


def test_the_server_gives_a_viewer_its_own_table():
    async def scenario(client, _):
        stranger = (await client.get("/map/gpus.csv")).status_code
        await sign_in(client)
        whole = await client.get("/map/gpus.csv")
        await sign_in(client, org="acme", token="acme-token")
        return stranger, whole, (await client.get("/map/gpus.csv", params={"rack": "rack-00"})).text

    stranger, whole, own = visit(scenario)
    assert stranger == 401
    assert whole.headers["content-type"].startswith("text/csv")
    assert "attachment" in whole.headers["content-disposition"]
    assert "blue" in whole.text
    assert "blue" not in own
    assert len(own.splitlines()) == 1 + 12
