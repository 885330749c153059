"""The files of NVIDIA's driver that containers get, for any place and change of the driver."""

import asyncio
import json
import os
from pathlib import Path

import pytest

from rackloom.claim.node.cdi import CdiDirectory, DriverSpec, daemon_edits, find_hook_program, workload_edits
from rackloom.errors import Retry
from rackloom.topology.discovery.nvidia_driver import find_driver

OLD, NEW = "570.172.08", "580.95.05"
LIBRARIES = "usr/lib/x86_64-linux-gnu"
COMMANDS = ("create-symlinks", "enable-cuda-compat", "update-ldcache")


def lay(root, *paths, content=""):
    for path in paths:
        (root / path).parent.mkdir(parents=True, exist_ok=True)
        (root / path).write_text(content)


def link(root, path, target):
    (root / path).parent.mkdir(parents=True, exist_ok=True)
    (root / path).symlink_to(target)


def install(root, version=NEW, place=LIBRARIES):
    """The files of a driver as a distribution lays them out."""
    lay(
        root,
        *(f"{place}/{stem}.so.{version}" for stem in ("libcuda", "libnvidia-ml", "libGLX_nvidia")),
        f"{place}/vdpau/libvdpau_nvidia.so.{version}",
        f"{place}/libc.so.6",
        f"{place}/libnvidia-container.so.1.17.8",
        "usr/bin/nvidia-smi",
        f"lib/firmware/nvidia/{version}/gsp_ga10x.bin",
    )
    for name, target in (
        ("libcuda.so", "libcuda.so.1"),
        ("libcuda.so.1", f"libcuda.so.{version}"),
        ("libnvidia-ml.so.1", f"libnvidia-ml.so.{version}"),
    ):
        (root / place / name).unlink(missing_ok=True)
        link(root, f"{place}/{name}", target)


def mounts(edits):
    return {mount.container_path: mount.host_path for mount in edits.mounts}


def hooks(edits):
    return {hook.args[1]: hook.args[2:] for hook in edits.hooks}


def test_with_a_hook_files_are_mounted_and_links_are_made(tmp_path):
    install(tmp_path)
    lay(tmp_path, "usr/bin/nvidia-cdi-hook", content=" ".join(COMMANDS))
    edits = workload_edits(find_driver(tmp_path, Path("/host")), find_hook_program(tmp_path, Path("/host")))
    assert mounts(edits) == {
        f"/{path}": f"/host/{path}"
        for path in (
            f"{LIBRARIES}/libGLX_nvidia.so.{NEW}",
            f"{LIBRARIES}/libcuda.so.{NEW}",
            f"{LIBRARIES}/libnvidia-ml.so.{NEW}",
            f"{LIBRARIES}/vdpau/libvdpau_nvidia.so.{NEW}",
            "usr/bin/nvidia-smi",
            f"lib/firmware/nvidia/{NEW}/gsp_ga10x.bin",
        )
    }
    assert edits.env == ("NVIDIA_VISIBLE_DEVICES=void",)
    assert {(hook.hook_name, hook.path, hook.args[0]) for hook in edits.hooks} == {
        ("createContainer", "/host/usr/bin/nvidia-cdi-hook", "nvidia-cdi-hook")
    }
    assert list(hooks(edits)) == list(COMMANDS)
    links = hooks(edits)["create-symlinks"]
    assert set(links[::2]) == {"--link"}
    assert set(links[1::2]) == {
        f"libcuda.so.1::/{LIBRARIES}/libcuda.so",
        f"libcuda.so.{NEW}::/{LIBRARIES}/libcuda.so.1",
        f"libnvidia-ml.so.{NEW}::/{LIBRARIES}/libnvidia-ml.so.1",
        f"libGLX_nvidia.so.{NEW}::/{LIBRARIES}/libGLX_indirect.so.0",
    }
    assert hooks(edits)["enable-cuda-compat"] == (f"--host-driver-version={NEW}",)
    folders = ("--folder", f"/{LIBRARIES}", "--folder", f"/{LIBRARIES}/vdpau")
    assert hooks(edits)["update-ldcache"] == folders


def test_without_a_hook_links_are_mounts_and_a_variable_tells_the_loader(tmp_path):
    install(tmp_path)
    (tmp_path / LIBRARIES / "libcuda.so").unlink()
    edits = workload_edits(find_driver(tmp_path))
    assert edits.hooks == ()
    search = f"LD_LIBRARY_PATH=/{LIBRARIES}:/{LIBRARIES}/vdpau"
    assert edits.env == ("NVIDIA_VISIBLE_DEVICES=void", search)
    found = mounts(edits)
    # Only hosts with development packages have the last one, but programs open it nevertheless.
    for name in (f"libcuda.so.{NEW}", "libcuda.so.1", "libcuda.so"):
        assert found[f"/{LIBRARIES}/{name}"] == f"/{LIBRARIES}/libcuda.so.{NEW}"
    assert found[f"/{LIBRARIES}/libGLX_indirect.so.0"] == f"/{LIBRARIES}/libGLX_nvidia.so.{NEW}"


def test_a_hook_is_asked_for_nothing_that_it_does_not_know(tmp_path):
    """Hooks before 1.17.5 fail for enable-cuda-compat, and the container fails with them."""
    install(tmp_path)
    lay(tmp_path, "usr/bin/nvidia-cdi-hook", content="create-symlinks update-ldcache")
    edits = workload_edits(find_driver(tmp_path), find_hook_program(tmp_path, Path("/")))
    assert list(hooks(edits)) == ["create-symlinks", "update-ldcache"]


def test_the_hook_of_the_gpu_operator_is_a_script_beside_the_program(tmp_path):
    lay(
        tmp_path, "usr/local/nvidia/toolkit/nvidia-cdi-hook", content="#!/bin/sh\nexec nvidia-cdi-hook.real\n"
    )
    lay(tmp_path, "usr/local/nvidia/toolkit/nvidia-cdi-hook.real", content=" ".join(COMMANDS))
    hook = find_hook_program(tmp_path, Path("/"))
    assert (hook.path, hook.commands) == ("/usr/local/nvidia/toolkit/nvidia-cdi-hook", frozenset(COMMANDS))


def test_a_driver_in_a_container_is_mounted_from_its_root(tmp_path):
    install(tmp_path / "run/nvidia/driver")
    lay(tmp_path, "usr/local/nvidia/toolkit/nvidia-cdi-hook", content=" ".join(COMMANDS))
    edits = workload_edits(find_driver(tmp_path), find_hook_program(tmp_path, Path("/")))
    path = f"/{LIBRARIES}/libcuda.so.{NEW}"
    assert mounts(edits)[path] == f"/run/nvidia/driver{path}"
    assert mounts(edits)["/usr/bin/nvidia-smi"] == "/run/nvidia/driver/usr/bin/nvidia-smi"
    assert edits.hooks[0].path == "/usr/local/nvidia/toolkit/nvidia-cdi-hook"


def test_links_through_alternatives_end_at_files(tmp_path):
    """Debian's absolute links mean another file on the host than to a reader below a root."""
    current = f"{LIBRARIES}/nvidia/current"
    lay(tmp_path, f"{current}/libcuda.so.{NEW}", f"{current}/libnvidia-ml.so.{NEW}")
    link(tmp_path, f"{current}/libcuda.so.1", f"libcuda.so.{NEW}")
    link(tmp_path, "etc/alternatives/libcuda", f"/{current}/libcuda.so.1")
    link(tmp_path, f"{LIBRARIES}/libcuda.so.1", "/etc/alternatives/libcuda")
    lay(tmp_path, "usr/bin/nvidia-cdi-hook", content=" ".join(COMMANDS))
    driver = find_driver(tmp_path)
    assert mounts(workload_edits(driver))[f"/{LIBRARIES}/libcuda.so.1"] == f"/{current}/libcuda.so.{NEW}"
    made = hooks(workload_edits(driver, find_hook_program(tmp_path, Path("/"))))["create-symlinks"]
    assert f"/{current}/libcuda.so.{NEW}::/{LIBRARIES}/libcuda.so.1" in made


def test_a_daemon_gets_nvidia_imex_and_needs_no_hook(tmp_path):
    install(tmp_path)
    assert not daemon_edits(find_driver(tmp_path))
    lay(tmp_path, "sbin/nvidia-imex", "sbin/nvidia-imex-ctl", "dev/nvidia0")
    edits = daemon_edits(find_driver(tmp_path, Path("/host")))
    assert mounts(edits) == {
        "/sbin/nvidia-imex": "/host/sbin/nvidia-imex",
        "/sbin/nvidia-imex-ctl": "/host/sbin/nvidia-imex-ctl",
        "/usr/bin/nvidia-smi": "/host/usr/bin/nvidia-smi",
        **{
            f"/{LIBRARIES}/{name}": f"/host/{LIBRARIES}/{stem}.so.{NEW}"
            for stem, names in (
                ("libcuda", ("libcuda.so", "libcuda.so.1", f"libcuda.so.{NEW}")),
                ("libnvidia-ml", ("libnvidia-ml.so.1", f"libnvidia-ml.so.{NEW}")),
            )
            for name in names
        },
    }
    assert edits.env == ("NVIDIA_VISIBLE_DEVICES=void", f"LD_LIBRARY_PATH=/{LIBRARIES}")
    assert edits.device_nodes == ()  # dev/nvidia0 is no device here
    assert edits.hooks == ()


def spec_of(root, tmp_path, **more):
    return DriverSpec(CdiDirectory(tmp_path / "cdi", "d.example"), workload_edits, base=root, **more)


def mounted(tmp_path):
    (file,) = (tmp_path / "cdi").iterdir()
    (device,) = json.loads(file.read_bytes())["devices"]
    return [mount["containerPath"] for mount in device["containerEdits"]["mounts"]]


def test_the_spec_follows_a_driver_that_comes_changes_and_goes(tmp_path):
    root = tmp_path / "root"
    root.mkdir()

    async def story():
        spec = spec_of(root, tmp_path)
        with pytest.raises(Retry, match=r"are not ready in .*root, .*root/run/nvidia/driver"):
            await spec.ids()
        assert await spec.refresh() is False
        install(root / "run/nvidia/driver", OLD)
        assert await spec.ids() == ("k8s.d.example/device=all",)
        assert f"/{LIBRARIES}/libcuda.so.{OLD}" in mounted(tmp_path)
        assert await spec.refresh() is False
        install(root / "run/nvidia/driver", NEW)
        for file in (root / "run/nvidia/driver").rglob(f"*.so.{OLD}"):
            file.unlink()
        assert await spec.refresh() is True
        assert spec.driver.version == NEW
        paths = mounted(tmp_path)
        assert f"/{LIBRARIES}/libcuda.so.{NEW}" in paths
        assert not any(OLD in path for path in paths)
        # Containers of prepared claims may start again, so their files stay. Others would find no file.
        (root / "run/nvidia/driver").rename(root / "gone")
        assert await spec.refresh() is True
        assert spec.driver is None
        with pytest.raises(Retry, match="files of NVIDIA's driver"):
            await spec.ids()
        assert mounted(tmp_path) == paths
        (root / "gone").rename(root / "run/nvidia/driver")
        assert await spec.ids() == ("k8s.d.example/device=all",)

    asyncio.run(story())


def test_a_hook_that_is_installed_later_is_used_from_then_on(tmp_path):
    install(tmp_path / "root")

    async def story():
        def make(driver):
            return workload_edits(driver, find_hook_program(tmp_path / "root", Path("/")))

        cdi = CdiDirectory(tmp_path / "cdi", "d.example")
        spec = DriverSpec(cdi, make, base=tmp_path / "root")
        await spec.ids()
        (file,) = (tmp_path / "cdi").iterdir()
        assert b"nvidia-cdi-hook" not in file.read_bytes()
        lay(tmp_path / "root", "usr/local/nvidia/toolkit/nvidia-cdi-hook", content=" ".join(COMMANDS))
        await spec.refresh()
        assert b"nvidia-cdi-hook" in file.read_bytes()

    asyncio.run(story())


def test_a_look_at_what_did_not_change_lists_no_directory(tmp_path, monkeypatch):
    install(tmp_path)
    calls = []
    scandir, listdir = os.scandir, os.listdir
    monkeypatch.setattr(os, "scandir", lambda *path: calls.append(path) or scandir(*path))
    monkeypatch.setattr(os, "listdir", lambda *path: calls.append(path) or listdir(*path))

    async def story():
        spec = spec_of(tmp_path, tmp_path, required=False, sysroot=tmp_path)
        await spec.refresh()
        assert calls
        calls.clear()
        await spec.refresh()
        assert calls == []

    asyncio.run(story())


def test_a_node_whose_devices_are_declared_needs_no_driver(tmp_path):
    assert asyncio.run(spec_of(tmp_path, tmp_path, required=False).ids()) == ()


def test_containerd_mounts_and_calls_what_was_meant(tmp_path, read_specs):
    install(tmp_path / "root")
    lay(tmp_path / "root", "usr/bin/nvidia-cdi-hook", content=" ".join(COMMANDS))

    def make(driver):
        return workload_edits(driver, find_hook_program(tmp_path / "root", Path("/")))

    spec = DriverSpec(CdiDirectory(tmp_path / "cdi", "d.example"), make, base=tmp_path / "root")
    (container,) = read_specs(tmp_path / "cdi", asyncio.run(spec.ids())).containers
    library = f"/{LIBRARIES}/libcuda.so.{NEW}"
    assert container.mounts[library] == library
    called = container.spec["hooks"]["createContainer"]
    assert [call["args"][1] for call in called] == list(COMMANDS)
