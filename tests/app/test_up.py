"""`rackloom up` as a process: as a script sees it, and after a kill."""

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
from contextlib import contextmanager
from pathlib import Path

import httpx2
import pytest
from tests.waiting import PATIENCE, until_seen

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
RACKLOOM = [sys.executable, "-m", "rackloom.cli.main"]


@contextmanager
def up(home, *arguments):
    process = subprocess.Popen(
        [*RACKLOOM, "up", "--port", "0", "--home", str(home), *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        line = process.stdout.readline()
        assert " at http://127.0.0.1:" in line, process.stderr.read()
        yield process, line.split(" at ")[1].split(",")[0]
    finally:
        if process.poll() is None:
            process.terminate()
        process.communicate(timeout=PATIENCE)


@pytest.fixture(scope="module")
def ended_home(tmp_path_factory):
    """The home of a service that was started and ended."""
    home = tmp_path_factory.mktemp("ended")
    with up(home):
        pass
    return home


@pytest.fixture
def used_home(ended_home, tmp_path):
    """A copy of such a home, which a test may damage."""
    return shutil.copytree(ended_home, tmp_path / "home", symlinks=True)


def rackloom(*arguments):
    return subprocess.run([*RACKLOOM, *arguments], capture_output=True, text=True, timeout=PATIENCE)


def client(home, url, org="demo", role="TENANT_ADMIN"):
    token = rackloom("token", "--home", str(home), "--org", org, "--role", role).stdout.strip()
    return httpx2.Client(
        base_url=f"{url}/v2/org/{org}/nico/", headers={"Authorization": f"Bearer {token}"}, timeout=PATIENCE
    )


def order_rack(http):
    site = http.get("site").json()[0]["id"]
    body = {"name": "job", "siteId": site}
    partition = http.post("nvlink-logical-partition", json=body).json()["id"]
    vpc = http.post("vpc", json=body | {"nvLinkLogicalPartitionId": partition}).json()["id"]
    kind = http.get("instance/type").json()[0]["id"]
    batch = {"namePrefix": "job", "count": 18, "vpcId": vpc, "instanceTypeId": kind}
    answer = http.post("instance/batch", json=batch)
    assert answer.status_code == 201, answer.text
    return partition


def ready(http):
    """All 18 instances once they are Ready, or an empty list before that."""
    seen = [
        instance for instance in http.get("instance?pageSize=100").json() if instance["status"] == "Ready"
    ]
    return seen if len(seen) == 18 else []


def test_a_killed_service_ends_in_the_same_place(tmp_path):
    with up(tmp_path) as (process, url), client(tmp_path, url) as http:
        partition = order_rack(http)
        os.kill(process.pid, signal.SIGKILL)
        process.wait(PATIENCE)
    with up(tmp_path) as (_, url), client(tmp_path, url) as http:
        until_seen(lambda: ready(http), "18 instances are ready")
        seen = [
            (interface["nvLinkLogicalPartitionId"], interface["nvLinkDomainId"], interface["status"])
            for instance in http.get("instance?pageSize=100").json()
            for interface in instance["nvLinkInterfaces"]
        ]
        assert len(seen) == 72
        assert len(set(seen)) == 1
        assert seen[0][0] == partition


def test_a_ready_site_stays_ready_over_a_kill(tmp_path):
    with up(tmp_path) as (process, url), client(tmp_path, url) as http:
        order_rack(http)
        before = until_seen(lambda: ready(http), "18 instances are ready")
        os.kill(process.pid, signal.SIGKILL)
        process.wait(PATIENCE)
    with up(tmp_path) as (_, url), client(tmp_path, url) as http:
        # The switches kept their partitions, so the first look after the start confirms everything.
        assert [instance["id"] for instance in ready(http)] == [instance["id"] for instance in before]
        endpoints = len(list((tmp_path / "twin").glob("*-*.json")))
        assert endpoints == 2


def test_a_second_service_on_the_same_home_is_refused_by_name(tmp_path):
    with up(tmp_path) as (process, _):
        second = rackloom("up", "--port", "0", "--home", str(tmp_path))
        assert second.returncode == 1
        assert f"{tmp_path} is in use by process {process.pid}" in second.stderr
        assert "fix: " in second.stderr


def test_a_taken_port_is_refused_and_harms_nothing(tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        refused = rackloom("up", "--port", str(port), "--home", str(tmp_path))
    assert refused.returncode == 1
    assert refused.stderr == (
        f"rackloom: cannot listen on 127.0.0.1:{port}: Address already in use\n"
        "  fix: stop the program that uses the port, or choose another port\n"
    )
    with up(tmp_path):
        pass


@pytest.mark.parametrize("port", ["65536", "-1"])
def test_a_port_that_there_is_not_is_a_mistake_of_usage(tmp_path, port):
    home = tmp_path / "home"
    refused = rackloom("up", f"--port={port}", "--home", str(home))
    assert refused.returncode == 2
    assert "--port" in refused.stdout + refused.stderr
    assert not home.exists()


@pytest.mark.parametrize("arguments", [("--racks", "3"), ("--profile", "gb300-nvl72")])
def test_a_home_keeps_the_racks_it_was_made_with(used_home, arguments):
    refused = rackloom("up", "--port", "0", "--home", str(used_home), *arguments)
    assert refused.returncode == 1
    assert "was made with 2 racks of gb200-nvl72" in refused.stderr
    assert "--racks 2 --profile gb200-nvl72" in refused.stderr


def test_an_unknown_profile_names_the_near_ones(tmp_path):
    refused = rackloom("up", "--port", "0", "--home", str(tmp_path), "--profile", "gb200-nvl27")
    assert refused.returncode == 1
    assert "gb200-nvl72" in refused.stderr


def test_two_cabled_racks_are_one_domain(tmp_path):
    with up(tmp_path, "--profile", "gb200-nvl36x2") as (_, url), client(tmp_path, url) as http:
        order_rack(http)
        until_seen(lambda: ready(http), "18 instances are ready")


def test_any_other_org_becomes_a_tenant_and_sees_only_its_own(tmp_path):
    with up(tmp_path) as (_, url):
        with client(tmp_path, url) as http:
            order_rack(http)
        with client(tmp_path, url, org="rival") as http:
            assert http.get("instance").json() == []
            assert http.get("nvlink-interface").json() == []
            order_rack(http)
            until_seen(lambda: ready(http), "18 instances are ready")


def demo_lines(process, last):
    """The output of a demonstration until a line that begins with `last`."""
    lines = [process.stdout.readline()]
    while not lines[-1].startswith(last):
        assert lines[-1], process.stderr.read()
        assert not lines[-1].startswith("FAILED"), [*lines, process.stdout.readline()]
        lines.append(process.stdout.readline())
    return lines


def test_a_demo_keeps_running_with_something_to_look_at(tmp_path):
    lost = "ok     a GPU is lost under the job"
    with up(tmp_path, "--demo") as (process, url):
        lines = demo_lines(process, lost)
        assert sum(line.startswith(("ok ", "degraded ")) for line in lines) == 7
        link = next(line.split(": ")[-1].strip() for line in lines if "signed in" in line)
        with httpx2.Client(timeout=PATIENCE) as browser:
            assert browser.get(link).status_code == 200
            assert "whole-rack" in browser.get(f"{url}/").text
        found = json.loads(rackloom("doctor", "--home", str(tmp_path), "--json").stdout)["findings"]
        assert "device untainted" in [finding["check"] for finding in found]
        assert (tmp_path / "transfers" / "demo.json").is_file()
    # The same home again: tenants keep their objects, and the job starts again.
    with up(tmp_path, "--demo") as (process, url), client(tmp_path, url, org="blue") as http:
        demo_lines(process, lost)
        assert len(http.get("nvlink-logical-partition").json()) == 1
        assert len(ready(http)) == 18


def test_a_demo_on_a_real_cluster_is_a_mistake_of_usage(tmp_path):
    refused = rackloom("up", "--demo", "--kubeconfig", "k", "--home", str(tmp_path / "home"))
    assert refused.returncode == 2
    assert "leave out --kubeconfig" in refused.stdout + refused.stderr
    assert not (tmp_path / "home").exists()


def test_a_token_needs_a_site(tmp_path):
    refused = rackloom("token", "--home", str(tmp_path / "none"), "--org", "demo", "--role", "TENANT_ADMIN")
    assert refused.returncode == 1
    assert "no site lives in" in refused.stderr
    assert not (tmp_path / "none").exists()


def carved(home, url):
    """How the example of a tenant's first partition ended."""
    token = rackloom("token", "--home", str(home), "--org", "demo", "--role", "TENANT_ADMIN").stdout
    return subprocess.run(
        [ROOT / "examples" / "two-trays" / "carve.sh"],
        capture_output=True,
        text=True,
        timeout=PATIENCE,
        env=os.environ | {"API": f"{url}/v2/org/demo/nico", "TOKEN": token.strip()},
    )


def test_the_example_of_a_tenants_first_partition(tmp_path):
    with up(tmp_path) as (_, url):
        done = carved(tmp_path, url)
    assert done.stderr == ""
    assert done.returncode == 0
    first, *instances, last = done.stdout.splitlines()
    assert first.endswith("a record, no GPU is in it yet")
    assert len(instances) == 2
    assert len({instance.partition(": ")[2] for instance in instances}) == 1
    assert last == "given back: no GPU is in a partition any more"


def test_the_example_gives_back_what_it_made_where_there_are_no_machines(tmp_path):
    with up(tmp_path, "--racks", "1") as (_, url), client(tmp_path, url) as http:
        ordered = order_rack(http)
        done = carved(tmp_path, url)
        assert [partition["id"] for partition in http.get("nvlink-logical-partition").json()] == [ordered]
        assert len(http.get("vpc").json()) == 1
    assert done.returncode == 1
    assert "POST instance/batch: " in done.stderr
    assert "not all is given back" not in done.stderr
    assert done.stdout.splitlines()[-1] == "given back: no GPU is in a partition any more"


def test_the_log_is_json_lines(ended_home):
    lines = (ended_home / "logs" / "rackloom.log").read_text().splitlines()
    assert all("event" in json.loads(line) for line in lines)
    assert lines


def store_is_lost(home):
    for file in home.glob("site.db*"):
        file.unlink()


def racks_are_lost(home):
    (home / "twin" / "racks.json").unlink()


def racks_are_damaged(home):
    (home / "twin" / "racks.json").write_bytes(b"{")


def switch_memory_is_damaged(home):
    for file in (home / "twin").glob("*-*.json"):
        file.write_bytes(b"")


def store_is_garbage(home):
    for file in home.glob("site.db-*"):
        file.unlink()
    (home / "site.db").write_bytes(b"not a database" * 1000)


def key_is_garbage(home):
    for file in (home / "keys").glob("*.pem"):
        file.write_bytes(b"")


@pytest.mark.parametrize(
    ("harm", "message"),
    [
        (store_is_lost, "site.db has lost its records"),
        (racks_are_lost, "racks.json is missing, though the store has machines"),
        (racks_are_damaged, "racks.json is damaged"),
        (switch_memory_is_damaged, ".json is damaged"),
        (store_is_garbage, "cannot be opened"),
        (key_is_garbage, "cannot be used"),
    ],
)
def test_a_home_that_is_not_whole_is_refused_with_the_file(used_home, harm, message):
    harm(used_home)
    refused = rackloom("up", "--port", "0", "--home", str(used_home))
    assert refused.returncode == 1
    assert message in refused.stderr
    assert "\n  fix: " in refused.stderr
    assert "Traceback" not in refused.stderr


@pytest.mark.parametrize(
    "arguments",
    [("--profile", "gb200"), ("--racks", "0"), ("--racks", "129"), ("--profile", "oci-bm.gpu.h100.8")],
)
def test_what_cannot_be_leaves_no_home_behind(tmp_path, arguments):
    refused = rackloom("up", "--port", "0", "--home", str(tmp_path / "new"), *arguments)
    assert refused.returncode == 1
    assert "Traceback" not in refused.stderr
    assert not (tmp_path / "new").exists()


def test_what_a_site_writes_is_its_owners_alone(ended_home):
    readable = [path for path in ended_home.rglob("*") if path.stat().st_mode & 0o077]
    assert readable == []


@pytest.mark.parametrize("arguments", [("--org", "../x"), ("--org", ""), ("--org", "demo", "--hours", "nan")])
def test_a_token_that_could_not_be_used_is_not_made(used_home, arguments):
    refused = rackloom("token", "--home", str(used_home), "--role", "TENANT_ADMIN", *arguments)
    assert refused.returncode == 1
    assert refused.stdout == ""
    assert refused.stderr.startswith("rackloom: ")
