"""Attributes from the metadata services of clouds: recorded answers, real HTTP, and no needless requests."""

import asyncio
import socket
from contextlib import suppress

import msgspec
import pytest
from tests.claim.node.nic.metadata_server import endless, failing, moved, recorded, serving, slow
from tests.waiting import PATIENCE, until_so

from rackloom.app.node.nic import NicOptions, _cloud_watcher
from rackloom.claim.node.nic import metadata
from rackloom.claim.node.nic.inventory import HostScanner
from rackloom.claim.node.nic.metadata import CloudWatcher, read_metadata
from rackloom.core.allocate.objects import Device, DeviceAttribute
from rackloom.core.nics.cloud import (
    AZURE_ASSET_TAG,
    CLOUD_ATTRIBUTES,
    NO_CLOUD_ATTRIBUTES,
    READERS,
    Cloud,
    CloudAttributes,
    MetadataAnswer,
    with_cloud_attributes,
)
from rackloom.errors import Retry

FIRST, SECOND, THIRD = (f"06:00:00:00:00:0{number}" for number in (1, 2, 3))
EXPECTED = {
    "gke": (
        {"block": "a" * 32, "subBlock": "b" * 32, "host": "c" * 32, "machineType": "a3-ultragpu-8g"},
        {
            "42:01:0a:00:00:07": {
                "networkName": "default",
                "networkProjectNumber": 123456789012,
                "ipAliases": "10.4.3.0/24,10.4.9.0/24",
            },
            "42:01:c0:a8:08:02": {"networkName": "rails", "networkProjectNumber": 123456789012},
        },
    ),
    "azure": (
        {
            "vmSize": "Standard_ND128isr_NDR_GB200_v6",
            "placementGroupId": "f67c14ab-e92c-408c-ae2d-da15866ec79a",
            "interconnectGroupId": "group-1",
            "interconnectSubgroupId": "subgroup-2",
        },
        {},
    ),
    "aws": (
        {"instanceType": "p5.48xlarge", "placementGroup": "training", "placementPartition": 3},
        {FIRST: {"networkCard": 0}, SECOND: {"networkCard": 17}, THIRD: {}},
    ),
    "oke": (
        {
            "hpcIslandId": "i" * 60,
            "networkBlockId": "n" * 60,
            "localBlockId": "l" * 60,
            "rackId": "rack-7",
            "gpuMemoryFabricId": "g" * 60,
        },
        {},
    ),
}


@pytest.fixture(autouse=True)
def patience(monkeypatch):
    """A machine that others share may stand still for a while."""
    monkeypatch.setattr(metadata, "READING_SECONDS", PATIENCE)


def plain(attributes):
    """Attributes as values, by the name after the domain."""
    return {
        name.partition("/")[2]: attribute.string if attribute.int_ is None else attribute.int_
        for name, attribute in attributes.items()
    }


def read(cloud, service):
    return asyncio.run(read_metadata(Cloud(cloud), service.url))


def replayed(cloud, answers):
    """A reader's result from recorded answers, without a server."""
    reading = READERS[Cloud(cloud)]()
    request = next(reading)
    try:
        while True:
            text = "token" if request.method == "PUT" else answers.get(request.path)
            answer = MetadataAnswer(
                status=404 if text is None else 200, text=text or "", headers={"metadata-flavor": "Google"}
            )
            request = reading.send(answer)
    except StopIteration as found:
        return found.value


@pytest.mark.parametrize("cloud", EXPECTED)
def test_each_service_is_read_as_it_wants_to_be(cloud):
    with serving(cloud) as service:
        found = read(cloud, service)
    node, by_mac = EXPECTED[cloud]
    assert plain(found.node) == node
    assert {mac: plain(attributes) for mac, attributes in found.by_mac.items()} == by_mac
    assert found == replayed(cloud, recorded(cloud))
    assert found.names() == set(CLOUD_ATTRIBUTES[Cloud(cloud)])


@pytest.mark.parametrize("cloud", EXPECTED)
def test_what_a_service_does_not_have_is_absent(cloud):
    with serving(cloud) as service:
        service.answers.clear()
        if cloud == "azure":
            with pytest.raises(Retry, match="status 400"):
                read(cloud, service)
        else:
            assert read(cloud, service).names() == frozenset()


def test_a_region_without_the_newest_version_is_asked_by_an_older_one():
    with serving("azure") as service:
        del service.answers[next(iter(service.answers))]
        assert set(plain(read("azure", service).node)) == {"vmSize", "placementGroupId"}


def test_a_tenancy_without_topology_has_the_network_block_and_the_rack():
    answer = msgspec.json.encode({"networkBlockId": "ocid1.b.oc1.iad." + "n" * 60, "rackId": "r7"}).decode()
    assert plain(replayed("oke", {"/opc/v2/host/": answer}).node) == {
        "networkBlockId": "n" * 60,
        "rackId": "r7",
    }


@pytest.mark.parametrize("host", ["", "/only/two", "/one/two/three/four", "garbage"])
def test_a_place_of_another_form_is_no_place(host):
    answers = {**recorded("gke"), "/computeMetadata/v1/instance/attributes/physical_host": host}
    assert set(plain(replayed("gke", answers).node)) == {"machineType"}


@pytest.mark.parametrize("text", ["projects/x/networks/y", "", "projects/9999999999999999999999/networks/n"])
def test_a_network_of_another_form_is_no_network(text):
    path = "/computeMetadata/v1/instance/network-interfaces/?recursive=true&alt=json"
    answers = {path: msgspec.json.encode([{"mac": FIRST, "network": text}]).decode()}
    assert replayed("gke", answers).by_mac[FIRST] == {}


@pytest.mark.parametrize("cloud", EXPECTED)
@pytest.mark.parametrize(
    "text", ["", "{", "[1]", '{"a": ' * 5000, "\0\xff", "null", '{"vmSize": 3, "rackId": []}']
)
def test_garbage_is_refused_or_absent(cloud, text):
    """At most it yields texts, of services that answer in plain text."""
    answers = dict.fromkeys(recorded(cloud), text)
    with suppress(Retry):
        found = replayed(cloud, answers)
        values = [*found.node.values(), *(a for each in found.by_mac.values() for a in each.values())]
        assert all(len((value.string or "").encode()) <= 64 for value in values)


@pytest.mark.parametrize("cloud", EXPECTED)
@pytest.mark.parametrize("status", [401, 403, 429, 500, 503])
def test_an_error_of_the_service_is_no_answer(cloud, status):
    with serving(cloud) as service:
        service.answers = dict.fromkeys(service.answers, failing(status))
        with pytest.raises(Retry, match=r"is answered with status|not answered by Google"):
            read(cloud, service)


def test_nobody_is_followed_to_another_place():
    with serving("oke") as service, serving("oke") as other:
        service.answers["/opc/v2/host/"] = moved(f"{other.url}/opc/v2/host/")
        with pytest.raises(Retry, match="status 302"):
            read("oke", service)
        assert not other.asked


def test_no_proxy_of_the_environment_is_used(monkeypatch):
    for name in ("http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    monkeypatch.delenv("no_proxy", raising=False)
    monkeypatch.delenv("NO_PROXY", raising=False)
    with serving("oke") as service:
        assert read("oke", service).names()


def test_a_service_that_never_ends_its_answer_is_left(monkeypatch):
    monkeypatch.setattr(metadata, "READING_SECONDS", 0.3)
    with serving("oke") as service:
        service.answers["/opc/v2/host/"] = slow
        with pytest.raises(Retry, match=r"does not answer|cannot be asked"):
            read("oke", service)


def test_an_answer_without_an_end_is_left():
    with serving("gke") as service:
        service.answers["/computeMetadata/v1/instance/machine-type"] = endless
        with pytest.raises(Retry, match="more than 262144 bytes"):
            read("gke", service)


def test_a_server_that_is_not_googles_is_not_believed():
    with serving("oke") as service:
        service.cloud = "aws"
        with pytest.raises(Retry, match="not answered by Google's service"):
            read("gke", service)


def test_nobody_there_is_told():
    with socket.create_server(("127.0.0.1", 0)) as taken:
        url = f"http://127.0.0.1:{taken.getsockname()[1]}"
    with pytest.raises(Retry, match="cannot be asked"):
        asyncio.run(read_metadata(Cloud.AWS, url))


# The services that the plugin queries.


@pytest.mark.parametrize(
    ("files", "cloud"),
    [
        ({"sys_vendor": "Google\n", "product_name": "Google Compute Engine\n"}, "gke"),
        ({"sys_vendor": "Microsoft Corporation", "chassis_asset_tag": AZURE_ASSET_TAG}, "azure"),
        ({"sys_vendor": "Amazon EC2", "product_name": "p5.48xlarge"}, "aws"),
        ({"sys_vendor": "Oracle Corporation", "chassis_asset_tag": "OracleCloud.com"}, "oke"),
        ({"sys_vendor": "Microsoft Corporation", "product_name": "Virtual Machine"}, None),
        ({"sys_vendor": "QEMU", "product_name": "Standard PC (Q35 + ICH9, 2009)"}, None),
        ({"sys_vendor": "Supermicro", "chassis_asset_tag": "Default string"}, None),
        ({}, None),
    ],
)
def test_auto_asks_only_the_cloud_that_firmware_names(tmp_path, files, cloud):
    dmi = tmp_path / "sys/class/dmi/id"
    dmi.mkdir(parents=True)
    for name, text in files.items():
        (dmi / name).write_text(text)
    watcher = _cloud_watcher(NicOptions(), HostScanner(tmp_path))
    assert (None if watcher is None else watcher.cloud.value) == cloud
    assert _cloud_watcher(NicOptions(cloud="none"), HostScanner(tmp_path)) is None
    stated = _cloud_watcher(NicOptions(cloud="oke"), HostScanner(tmp_path))
    assert stated is not None
    assert stated.cloud is Cloud.OKE


# The published attributes.


def test_a_nic_has_the_nodes_attributes_and_its_own():
    found = CloudAttributes(
        node={"c/type": DeviceAttribute(string="t")},
        by_mac={FIRST: {"c/net": DeviceAttribute(string="n")}},
    )
    device = Device(name="d", attributes={"rdma": DeviceAttribute(bool_=True)})
    own = with_cloud_attributes(device, (None, FIRST.upper()), found)
    assert set(own.attributes) == {"rdma", "c/type", "c/net"}
    assert set(with_cloud_attributes(device, (SECOND,), found).attributes) == {"rdma", "c/type"}
    assert with_cloud_attributes(device, (FIRST,), NO_CLOUD_ATTRIBUTES) is device


def test_a_service_that_comes_late_is_read_and_what_is_known_outlives_it(monkeypatch):
    monkeypatch.setattr(metadata, "RETRY_SECONDS", 0.02)
    monkeypatch.setattr(metadata, "AGAIN_SECONDS", 0.02)

    async def story(service):
        woken = []
        host = service.answers.pop("/opc/v2/host/")
        service.answers["/opc/v2/host/"] = failing(503)
        watcher = CloudWatcher(Cloud.OKE, service.url)
        task = asyncio.create_task(watcher.watch(lambda: woken.append(watcher.known)))
        await until_so(lambda: len(service.asked) > 2, "asked again")
        assert watcher.known == NO_CLOUD_ATTRIBUTES
        service.answers["/opc/v2/host/"] = host
        await until_so(lambda: woken, "read")
        service.answers["/opc/v2/host/"] = failing(503)
        asked = len(service.asked)
        await until_so(lambda: len(service.asked) > asked + 2, "asked again")
        assert plain(watcher.known.node)["rackId"] == "rack-7"
        assert len(woken) == 1
        task.cancel()

    with serving("oke") as service:
        asyncio.run(story(service))
