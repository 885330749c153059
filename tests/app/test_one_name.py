"""One part has one name on every surface: scenario, finding, map, metric, event and log."""

import json
import subprocess
import sys

import httpx2
import pytest
from tests.waiting import PATIENCE

from rackloom.testing import start_site

GPU, TRAY, NIC = "rack-01/slot-2/gpu-2", "rack-01/slot-2", "rack-01/slot-5/nic-0"
OURS = {"Sec-Fetch-Site": "same-origin"}


@pytest.fixture(scope="module")
def site():
    with start_site(seed="7", in_process=True) as running:
        running.do("make-logical-partition", name="lp")
        running.do("make-vpc", name="net", logical_partition="lp")
        running.do("make-instances", group="job", vpc="net", count=18)
        running.expect("instances", group="job", status="Ready")
        running.expect("clique-label", tray=TRAY)
        yield running


@pytest.fixture(scope="module")
def browser(site):
    with httpx2.Client(base_url=site.url, timeout=PATIENCE) as client:
        operator = {"org": "demo", "token": site.token(role="PROVIDER_ADMIN")}
        assert client.post("/map/login", data=operator, headers=OURS).status_code == 303
        yield client


def doctor(site, *options):
    command = [sys.executable, "-m", "rackloom.cli.main", "doctor", "--home", site.home, *options]
    return subprocess.run([*map(str, command)], capture_output=True, text=True, timeout=PATIENCE).stdout


def findings_of(site, check):
    return [found for found in json.loads(doctor(site, "-o", "json"))["findings"] if found["check"] == check]


@pytest.mark.slow
def test_a_gpu_has_one_name(site, browser, tmp_path):
    # Scenario and inject.
    assert site.inject("gpu-xid", gpu=GPU, xid=79).startswith(GPU)
    assert site.expect("finding", check="device untainted", subject=GPU).startswith(
        f"device untainted of {GPU}: "
    )

    # The doctor: JSON, text, and the label of its metric.
    (found,) = findings_of(site, "device untainted")
    assert (found["place"], found["subject"]) == (GPU, GPU)
    assert found["title"].startswith(f"{GPU} ")
    metrics = tmp_path / "doctor.prom"
    assert f"{found['severity'].upper()}" in (text := doctor(site, "--textfile", metrics))
    assert f"  {found['title']}" in text
    assert f'rackloom_doctor_places{{check="device untainted",place="{GPU}"}} 1.0' in metrics.read_text()

    # The map: the finding, the drawing, the panel of the GPU, and its address.
    site.wait_until(lambda: found["title"] in browser.get("/?rack=rack-01").text)
    page = browser.get("/?rack=rack-01").text
    assert f'aria-label="{GPU}: ' in page
    shown = browser.get("/", params={"gpu": GPU}, follow_redirects=True)
    assert f"<h3>{GPU}</h3>" in shown.text

    # A node does not know its rack, so its log has the vendor's number. The map answers it with the name.
    lines = [json.loads(line) for line in site.log.read_text().splitlines()]
    (xid,) = (line for line in lines if line["event"] == "gpu.xid")
    numbers = [xid["gpu"], *place_of(browser, xid["gpu"])]
    for number in numbers:
        answer = browser.get("/map/search", params={"find": number}).text
        assert GPU in answer, number
    site.clear()


def place_of(browser, uuid):
    """Other numbers of the GPU, as vendors' tools print them."""
    rows = browser.get("/map/gpus.csv").text.splitlines()
    (row,) = (row for row in rows if uuid in row)
    cells = dict(zip(rows[0].split(","), row.split(","), strict=True))
    assert cells["name"] == GPU
    guid = int(cells["fabric_guid"], 16)
    chassis = cells["machine"].rpartition("-")[0].upper()
    return [
        str(guid),
        f"{guid:X}",
        f"{cells['node']}/gpu-2",
        f"{chassis} slot 2 module 3",
        "GPU 3 of rack-01 slot 2",
    ]


@pytest.mark.slow
def test_a_gpu_that_the_switch_finds_sick_has_one_name(site):
    assert site.inject("gpu-health", instance=TRAY, gpu="gpu-2", health="no-nvlink").startswith(GPU)
    site.expect("finding", check="GPU health", subject=GPU)
    (found,) = findings_of(site, "GPU health")
    assert (found["place"], found["subject"]) == (GPU, GPU)
    # A person finds it in the rack by the vendor's numbers.
    assert any("slot 2 module 3, fabric GUID 0x" in line for line in found["evidence"])
    site.clear()


@pytest.mark.slow
def test_a_nic_has_one_name(site, browser):
    assert site.inject("nic-link-down", nic=NIC).startswith(NIC)
    site.expect("finding", check="NIC link", subject=NIC)
    (found,) = findings_of(site, "NIC link")
    assert (found["place"], found["subject"]) == (NIC, NIC)
    assert NIC in browser.get("/map/search", params={"find": NIC}).text
    site.clear()


@pytest.mark.slow
def test_a_tray_has_one_name(site):
    site.inject("tray-pulled", instance=TRAY)
    site.expect("finding", check="machine present", tray=TRAY)
    (found,) = findings_of(site, "machine present")
    assert found["place"] == TRAY
    # The event that the tenant reads names each GPU of its machine. The rack is the provider's affair.
    bearer = {"Authorization": f"Bearer {site.token('red')}"}
    machine = next(tray.machine for tray in site.trays if tray.name == TRAY)

    def events():
        shown = httpx2.get(
            f"{site.api('red')}/instance?pageSize=100", headers=bearer, timeout=PATIENCE
        ).json()
        (instance,) = (row for row in shown if row["machineId"] == machine)
        return [entry["message"] for entry in instance["statusHistory"]]

    site.wait_until(lambda: any(f"{GPU.rpartition('/')[2]}: " in message for message in events()))
    site.clear()
