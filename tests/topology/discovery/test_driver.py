"""The places of NVIDIA's driver, and the version that counts."""

from pathlib import Path, PurePosixPath

import pynvml
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rackloom.errors import Retry
from rackloom.topology.discovery.nvidia_driver import (
    CONTAINER_DRIVER_ROOT,
    LIBRARY_PLACES,
    PROGRAM_PLACES,
    VALIDATIONS,
    driver_fingerprint,
    driver_missing_error,
    find_driver,
    loaded_version,
    nvml_session,
)

NEW = "580.95.05"
versions = st.tuples(st.integers(450, 999), st.integers(0, 300), st.integers(0, 99)).map(
    lambda numbers: "{}.{:02}.{:02}".format(*numbers)
)


def lay(root, *paths):
    for path in paths:
        (root / path).parent.mkdir(parents=True, exist_ok=True)
        (root / path).touch()


@pytest.mark.parametrize("below", ["", CONTAINER_DRIVER_ROOT])
@pytest.mark.parametrize("place", LIBRARY_PLACES)
def test_libraries_are_found_wherever_distributions_and_containers_have_them(tmp_path, below, place):
    lay(tmp_path / below, f"{place}/libcuda.so.{NEW}")
    driver = find_driver(tmp_path, Path("/host"))
    assert (driver.version, driver.host_root) == (NEW, Path("/host") / below)
    (file,) = driver.libraries()
    assert file.path == PurePosixPath(f"/{place}/libcuda.so.{NEW}")


@pytest.mark.parametrize("arch", ["x86_64", "aarch64"])
def test_both_architectures_are_searched(arch):
    assert f"usr/lib/{arch}-linux-gnu" in LIBRARY_PLACES


@pytest.mark.parametrize("place", PROGRAM_PLACES)
def test_programs_are_found_in_every_place(tmp_path, place):
    lay(tmp_path, f"usr/lib64/libcuda.so.{NEW}", f"{place}/nvidia-smi")
    (file,) = find_driver(tmp_path).programs("nvidia-imex", "nvidia-smi")
    assert file.path == PurePosixPath(f"/{place}/nvidia-smi")


@pytest.mark.parametrize("target", ["usr/{}", "/usr/{}"])
def test_a_directory_with_two_paths_is_searched_once(tmp_path, target):
    lay(
        tmp_path,
        f"usr/lib64/libcuda.so.{NEW}",
        "usr/bin/nvidia-smi",
        f"usr/lib/firmware/nvidia/{NEW}/gsp.bin",
    )
    for name in ("lib64", "bin", "lib"):
        (tmp_path / name).symlink_to(target.format(name))
    driver = find_driver(tmp_path)
    assert [str(file.path) for file in driver.libraries()] == [f"/usr/lib64/libcuda.so.{NEW}"]
    assert [str(file.path) for file in driver.programs("nvidia-smi")] == ["/usr/bin/nvidia-smi"]
    assert [str(file.path) for file in driver.firmware()] == [f"/usr/lib/firmware/nvidia/{NEW}/gsp.bin"]


@given(data=st.data(), there=st.sets(versions, min_size=1, max_size=4))
def test_of_several_versions_that_of_the_kernel_module_counts_else_the_newest(tmp_path_factory, data, there):
    root = tmp_path_factory.mktemp("driver")
    lay(root, *(f"usr/lib64/{stem}.so.{version}" for version in there for stem in ("libcuda", "libnvidia-x")))
    loaded = data.draw(st.none() | st.sampled_from(sorted(there)) | versions)
    driver = find_driver(root, loaded=loaded)
    newest = max(there, key=lambda version: tuple(map(int, version.split("."))))
    assert driver.version == (loaded if loaded in there else newest)
    names = {file.path.name for file in driver.libraries()}
    assert names == {f"{stem}.so.{driver.version}" for stem in ("libcuda", "libnvidia-x")}


def test_of_two_roots_that_of_the_kernel_module_counts_else_the_hosts(tmp_path):
    old = "570.172.08"
    lay(tmp_path, f"usr/lib64/libcuda.so.{old}")
    lay(tmp_path / CONTAINER_DRIVER_ROOT, f"usr/lib64/libcuda.so.{NEW}", "dev/nvidiactl")
    assert find_driver(tmp_path).version == old
    assert find_driver(tmp_path, loaded="590.44.01").version == old
    driver = find_driver(tmp_path, loaded=NEW)
    assert driver.version == NEW
    assert driver.devices == tmp_path / CONTAINER_DRIVER_ROOT / "dev"
    (tmp_path / CONTAINER_DRIVER_ROOT / "dev/nvidiactl").unlink()
    assert driver.devices == tmp_path / "dev"


@pytest.mark.parametrize("file", [".driver-ctr-ready", "driver-ready"])
def test_a_driver_container_counts_while_the_operator_calls_it_ready(tmp_path, file):
    """Before it is unmounted its files exist but may not be used, since the module is to be unloaded."""
    lay(tmp_path / CONTAINER_DRIVER_ROOT, f"usr/lib64/libcuda.so.{NEW}")
    assert find_driver(tmp_path) is not None
    before = driver_fingerprint(tmp_path, NEW)
    (tmp_path / VALIDATIONS).mkdir(parents=True)
    assert find_driver(tmp_path, loaded=NEW) is None
    assert driver_fingerprint(tmp_path, NEW) != before
    assert "kubectl get pods" in (driver_missing_error(tmp_path).nearest_fix or "")
    lay(tmp_path, f"{VALIDATIONS}/{file}")
    assert find_driver(tmp_path) is not None
    assert driver_fingerprint(tmp_path, NEW) == before


def test_the_hosts_own_driver_needs_nobody_to_call_it_ready(tmp_path):
    lay(tmp_path, f"usr/lib64/libcuda.so.{NEW}")
    (tmp_path / VALIDATIONS).mkdir(parents=True)
    assert find_driver(tmp_path) is not None


def test_nvml_is_not_started_while_the_driver_container_is_not_ready(tmp_path, monkeypatch):
    """An open /dev/nvidiactl keeps the operator from unloading the module."""

    def start(_flags):
        raise AssertionError("NVML was started")

    monkeypatch.setattr(pynvml, "nvmlInitWithFlags", start)
    lay(tmp_path / CONTAINER_DRIVER_ROOT, f"usr/lib64/libnvidia-ml.so.{NEW}")
    (tmp_path / VALIDATIONS).mkdir(parents=True)
    with nvml_session(tmp_path) as nvml:
        assert nvml is None


def test_names_without_a_version_are_taken_by_their_stems(tmp_path):
    lay(tmp_path, "usr/lib64/libcuda.so.1", "usr/lib64/libnvidia-ml.so.1", "usr/lib64/libc.so.6")
    driver = find_driver(tmp_path)
    assert driver.version is None
    assert [file.path.name for file in driver.libraries("libcuda", "libnvidia-*")] == [
        "libcuda.so.1",
        "libnvidia-ml.so.1",
    ]


def test_what_only_looks_like_a_driver_is_none(tmp_path):
    assert find_driver(tmp_path) is None
    (tmp_path / "usr/lib64/libcuda.so.1").mkdir(parents=True)
    (tmp_path / "usr/lib64/libnvidia-ml.so.1").symlink_to("libnvidia-ml.so.1")
    (tmp_path / f"usr/lib64/libcuda.so.{NEW}").symlink_to("../../../../../../etc/nowhere")
    lay(tmp_path, "usr/lib64/libcudart.so.13")
    assert find_driver(tmp_path) is None


@pytest.mark.parametrize(
    "line",
    [
        "NVRM version: NVIDIA UNIX x86_64 Kernel Module  580.95.05  Sat Aug 19 01:15:15 UTC 2023",
        "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.95.05  Release Build  (builder@host)",
        "NVRM version: NVIDIA UNIX Open Kernel Module for aarch64  580.95.05  Release Build  (builder@host)",
    ],
)
def test_the_kernel_module_says_its_version(tmp_path, line):
    assert loaded_version(tmp_path) is None
    lay(tmp_path, "proc/driver/nvidia/version")
    (tmp_path / "proc/driver/nvidia/version").write_text(f"{line}\nGCC version:  gcc version 12.3.0\n")
    assert loaded_version(tmp_path) == NEW


def test_the_library_of_another_version_takes_the_place_of_the_first(tmp_path, monkeypatch):
    """Any two libraries will do: the test checks which one the bindings call."""
    monkeypatch.setattr(pynvml, "nvmlLib", None)
    monkeypatch.setattr(pynvml, "_nvmlGetFunctionPointer_cache", {"nvmlInitWithFlags": None})
    system = next(path for path in map(Path, _mapped()) if path.name.startswith("libc."))
    library = tmp_path / CONTAINER_DRIVER_ROOT / "usr/lib64"
    library.mkdir(parents=True)
    for version in ("570.172.08", NEW):
        (library / f"libnvidia-ml.so.{version}").write_bytes(system.read_bytes())
        with pytest.raises(Retry, match="NVML does not start: Function Not Found"), nvml_session(tmp_path):
            pass
        assert pynvml.nvmlLib._name == str(library / f"libnvidia-ml.so.{version}")
    # An open session keeps its library, since its handles belong to the library that made them.
    monkeypatch.setattr(pynvml, "_nvmlLib_refcount", 1)
    (library / "libnvidia-ml.so.590.44.01").write_bytes(system.read_bytes())
    # The old library is not called for the new driver either.
    with pytest.raises(Retry, match="is still open"), nvml_session(tmp_path):
        pass
    assert pynvml.nvmlLib._name == str(library / f"libnvidia-ml.so.{NEW}")


def test_packages_of_another_version_wait_for_their_module(tmp_path, monkeypatch):
    """On a host, an upgrade replaces the libraries at once, and the module at the next boot."""
    monkeypatch.setattr(pynvml, "nvmlLib", None)
    monkeypatch.setattr(pynvml, "_nvmlGetFunctionPointer_cache", {"nvmlInitWithFlags": None})
    monkeypatch.setattr("rackloom.topology.discovery.nvidia_driver.loaded_version", lambda: "570.172.08")
    system = next(path for path in map(Path, _mapped()) if path.name.startswith("libc."))
    library = tmp_path / "usr/lib64"
    library.mkdir(parents=True)
    old, new = (library / f"libnvidia-ml.so.{version}" for version in ("570.172.08", NEW))
    old.write_bytes(system.read_bytes())
    for _ in range(2):
        with pytest.raises(Retry, match="NVML does not start: Function Not Found"), nvml_session(tmp_path):
            pass
        assert pynvml.nvmlLib._name == str(old)
        old.unlink(missing_ok=True)
        new.write_bytes(system.read_bytes())
    monkeypatch.setattr("rackloom.topology.discovery.nvidia_driver.loaded_version", lambda: NEW)
    with pytest.raises(Retry), nvml_session(tmp_path):
        pass
    assert pynvml.nvmlLib._name == str(new)


def _mapped():
    """Libraries of this process."""
    lines = Path("/proc/self/maps").read_text().splitlines()
    return {line.split()[-1] for line in lines if ".so" in line}
