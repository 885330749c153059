"""A live cluster, read through a stand-in that speaks kubectl's command line and JSON."""

import json
import os
import stat
from pathlib import Path

import msgspec
import pytest

from rackloom.claim.manifests.cluster import read_cluster
from rackloom.core.allocate.driver_slices import device_classes, slices_of
from rackloom.errors import Refused
from rackloom.topology.profiles import load_machine

API = {"apiVersion": "resource.k8s.io/v1"}


def published():
    slices = slices_of(load_machine("azure-nd96isr-h100-v5"), "h100-a")
    kinds = [("ResourceSlice", slices), ("DeviceClass", device_classes())]
    return [API | {"kind": kind} | msgspec.to_builtins(obj) for kind, found in kinds for obj in found]


@pytest.fixture
def kubectl(tmp_path, monkeypatch):
    def stand_in(answer):
        program = tmp_path / "kubectl"
        program.write_text(f'#!/bin/sh\necho "$@" > {tmp_path}/asked\n{answer}\n')
        program.chmod(program.stat().st_mode | stat.S_IXUSR)
        monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
        return tmp_path / "asked"

    return stand_in


def test_slices_and_classes_are_read_from_the_chosen_context(kubectl, tmp_path):
    (tmp_path / "list.json").write_text(
        json.dumps({"apiVersion": "v1", "kind": "List", "items": published()})
    )
    asked = kubectl(f"cat {tmp_path}/list.json")
    found = read_cluster(Path("theirs"), "prod")
    assert {slice_.spec.driver for slice_ in found.slices} == {"gpu.nvidia.com", "dra.net"}
    assert len(found.classes) == 2
    assert asked.read_text().startswith(
        "--kubeconfig theirs --context prod get resourceslices.resource.k8s.io,"
    )


def test_what_kubectl_complains_of_is_told(kubectl):
    kubectl("echo 'The connection to the server was refused' >&2; exit 1")
    with pytest.raises(Refused) as refused:
        read_cluster()
    assert refused.value.reason.endswith("The connection to the server was refused")
    assert refused.value.nearest_fix == "name a dump with --slices instead"


def test_without_kubectl_it_is_refused(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(Refused, match="kubectl is not on the PATH"):
        read_cluster()


def rule(**selector):
    taint = {"key": "admin.test/hot", "effect": "NoSchedule"}
    return {
        "apiVersion": "resource.k8s.io/v1beta2",
        "kind": "DeviceTaintRule",
        "metadata": {"name": "hot"},
        "spec": {"deviceSelector": selector, "taint": taint},
        "status": {"conditions": []},
    }


def tainted(found):
    return {
        (slice_.spec.driver, device.name)
        for slice_ in found.slices
        for device in slice_.spec.devices
        if any(taint.key == "admin.test/hot" for taint in device.taints)
    }


def test_rules_taint_the_devices_that_they_select(kubectl, tmp_path):
    def found(*rules):
        items = {"apiVersion": "v1", "kind": "List", "items": [*published(), *rules]}
        (tmp_path / "list.json").write_text(json.dumps(items))
        kubectl(f"cat {tmp_path}/list.json")
        return tainted(read_cluster())

    assert found(rule(driver="gpu.nvidia.com", device="gpu-3")) == {("gpu.nvidia.com", "gpu-3")}
    assert {driver for driver, _ in found(rule(driver="dra.net"))} == {"dra.net"}
    assert found(rule(pool="another")) == set()
    assert len(found(rule())) > 8, "an empty selector selects all"
    without = rule()
    del without["spec"]["deviceSelector"]
    assert found(without) == set()


def test_a_server_without_rules_is_no_error(kubectl, tmp_path):
    (tmp_path / "list.json").write_text(
        json.dumps({"apiVersion": "v1", "kind": "List", "items": published()})
    )
    kubectl(
        f"""case "$*" in *devicetaintrules*)
        echo "error: the server doesn't have a resource type \\"devicetaintrules\\"" >&2; exit 1;;
        esac; cat {tmp_path}/list.json"""
    )
    assert read_cluster().slices
