"""The parts of an image that need no download."""

import hashlib
import importlib.util
import io
import json
import marshal
import re
import sys
import tarfile
import tomllib
from pathlib import Path

import pytest
import yaml
from deploy.image.trees import (
    DIRECTORY,
    FILE,
    BuildError,
    Entry,
    add,
    check_machine,
    compiler,
    directory,
    link,
    read_tar,
    text,
    with_bytecode,
    without,
    write_tar,
)
from hypothesis import given
from hypothesis import strategies as st

from deploy.image import build, debian
from rackloom.core.cluster.domain_objects import ComputeDomain
from rackloom.core.cluster.names import AllocationMode
from rackloom.core.domains import manifests
from rackloom.core.domains.settings import ControllerSettings, ImexDaemonSettings

ROOT = Path(__file__).parents[3]
NAMES = st.sampled_from(["a", "b", "lib", "x.py", "ä", "n" * 120])
ENTRIES = st.one_of(
    st.builds(Entry, st.just(FILE), st.sampled_from([0o644, 0o755]), st.binary(max_size=2000)),
    st.builds(link, st.sampled_from(["a", "/usr/lib/b", "../ö"])),
    st.builds(directory, st.sampled_from([0o755, 0o1777])),
)
TREES = st.dictionaries(st.lists(NAMES, min_size=1, max_size=3).map("/".join), ENTRIES, max_size=8)


@pytest.fixture(scope="module")
def own():
    if compiler(debian.needs().python) is None:
        pytest.skip(f"NO PYTHON {debian.needs().python}: an image from here has no bytecode")
    return build.own_tree()


@given(TREES)
def test_a_tree_is_the_same_tar_whatever_it_was_made_of_and_read_back_from_it(tmp_path_factory, tree):
    place = tmp_path_factory.mktemp("tar")
    write_tar(tree, place / "1.tar")
    write_tar(dict(reversed(tree.items())), place / "2.tar")
    assert (place / "1.tar").read_bytes() == (place / "2.tar").read_bytes()
    with tarfile.open(place / "1.tar") as tar:
        assert all((info.mtime, info.uid, info.uname) == (0, 0, "") for info in tar)
    with tarfile.open(place / "1.tar") as tar:
        read = dict(read_tar(tar))
    assert {path: entry for path, entry in read.items() if path in tree} == tree
    assert {entry.kind for path, entry in read.items() if path not in tree} <= {DIRECTORY}


def test_a_hard_link_is_a_file_of_its_own_and_a_device_is_refused():
    content = io.BytesIO()
    with tarfile.open(fileobj=content, mode="w") as tar:
        file, hard, device = (tarfile.TarInfo(name) for name in ("./a", "./b", "./null"))
        file.size = 3
        tar.addfile(file, io.BytesIO(b"abc"))
        hard.type, hard.linkname = tarfile.LNKTYPE, "./a"
        tar.addfile(hard)
        device.type = tarfile.CHRTYPE
        tar.addfile(device)
    content.seek(0)
    with tarfile.open(fileobj=content) as tar:
        entries = read_tar(tar)
        assert [next(entries), next(entries)] == [("a", text("abc")), ("b", text("abc"))]
        with pytest.raises(BuildError, match="/null"):
            next(entries)


def test_a_path_has_one_content():
    tree = {"etc": directory(0o700), "etc/x": text("1")}
    add(tree, "etc", directory())
    add(tree, "etc/x", text("1"))
    with pytest.raises(BuildError, match="/etc/x"):
        add(tree, "etc/x", text("2"))


def test_a_file_of_another_architecture_is_refused():
    header = b"\x7fELF" + bytes(14) + (183).to_bytes(2, "little")
    check_machine({"usr/lib/x.so": Entry(FILE, 0o644, header), "usr/lib/x.py": text("")}, "arm64")
    with pytest.raises(BuildError, match=r"/usr/lib/x\.so"):
        check_machine({"usr/lib/x.so": Entry(FILE, 0o644, header)}, "amd64")


def test_what_matches_is_left_but_for_what_is_kept():
    tree = {"usr/share/doc/a/copyright": text(""), "usr/share/doc/a/x/README": text(""), "etc/a": text("")}
    assert set(without(tree, ["usr/share/doc/*"], ["*/copyright"])) == {"usr/share/doc/a/copyright", "etc/a"}
    assert without(tree, []) == tree


def test_bytecode_is_used_without_a_look_at_the_source_and_no_module_is_no_error():
    tree = {"usr/lib/good.py": text("answer = 42\n"), "usr/lib/template.py": text("%if x:\n")}
    compiled = with_bytecode(tree, sys.executable)
    assert compiled.keys() - tree.keys() == {importlib.util.cache_from_source("usr/lib/good.py")}
    data = compiled[importlib.util.cache_from_source("usr/lib/good.py")].data
    assert data[:4] == importlib.util.MAGIC_NUMBER
    assert int.from_bytes(data[4:8], "little") == 0b01  # by hash, and not checked (PEP 552)
    code = marshal.loads(data[16:])  # noqa: S302
    assert code.co_filename == "/usr/lib/good.py"


@pytest.mark.slow
def test_our_layer_is_the_same_each_time_and_knows_nothing_of_this_machine(own, tmp_path):
    write_tar(own, tmp_path / "1.tar")
    write_tar(build.own_tree(), tmp_path / "2.tar")
    assert (tmp_path / "1.tar").read_bytes() == (tmp_path / "2.tar").read_bytes()
    strange = (str(ROOT).encode(), sys.executable.encode())
    assert [path for path, entry in own.items() if any(text in entry.data for text in strange)] == []


@pytest.mark.slow
def test_no_data_of_the_wheel_is_in_the_image(own):
    assert [path for path in own if ".data/" in path] == []


def test_each_module_of_ours_has_its_bytecode(own):
    modules = {path for path in own if path.endswith(".py")}
    assert len(modules) > 300
    tag = f"cpython-{debian.needs().python.replace('.', '')}"
    cached = {f"{Path(path).parent}/__pycache__/{Path(path).stem}.{tag}.pyc" for path in modules}
    assert cached <= own.keys()


@pytest.mark.parametrize(("arch", "variant"), [("amd64", {}), ("arm64", {"variant": "v8"})])
def test_the_archive_is_a_layout_that_a_runtime_imports_by_name(tmp_path, arch, variant):
    layers = [tmp_path / "1.tar", tmp_path / "2.tar"]
    for layer in layers:
        write_tar({"etc/name": text(layer.name)}, layer)
    archive = tmp_path / "image.tar"
    build.write_archive(archive, "docker.io/library/rackloom:0.1.0", arch, layers)
    with tarfile.open(archive) as tar:
        blobs = {info.name: tar.extractfile(info).read() for info in tar}
    # Each blob is named by its hash, and nothing else is there.
    for name, data in blobs.items():
        assert name in ("oci-layout", "index.json", f"blobs/sha256/{hashlib.sha256(data).hexdigest()}")
    assert json.loads(blobs["oci-layout"]) == {"imageLayoutVersion": "1.0.0"}
    (entry,) = json.loads(blobs["index.json"])["manifests"]
    assert entry["annotations"] == {
        "io.containerd.image.name": "docker.io/library/rackloom:0.1.0",
        "org.opencontainers.image.ref.name": "0.1.0",
    }
    assert entry["platform"] == {"architecture": arch, "os": "linux", **variant}
    manifest = blob_of(blobs, entry, "application/vnd.oci.image.manifest.v1+json")
    config = blob_of(blobs, manifest["config"], "application/vnd.oci.image.config.v1+json")
    assert config["config"] == build.CONFIG
    assert (config["architecture"], config["os"]) == (arch, "linux")
    assert config["rootfs"]["diff_ids"] == [layer["digest"] for layer in manifest["layers"]]
    contents = [blobs[f"blobs/sha256/{layer['digest'][7:]}"] for layer in manifest["layers"]]
    assert contents == [layer.read_bytes() for layer in layers]


def blob_of(blobs, described, media_type):
    data = blobs[f"blobs/sha256/{described['digest'].removeprefix('sha256:')}"]
    assert (described["size"], described["mediaType"]) == (len(data), media_type)
    return json.loads(data)


def containers():
    """Each container that we write or make, by where it is found."""
    for path in sorted((ROOT / "deploy").glob("*/*/*.yaml")):
        for document in yaml.safe_load_all(path.read_text()):
            if document and document.get("kind") in ("Deployment", "DaemonSet"):
                for container in document["spec"]["template"]["spec"]["containers"]:
                    yield f"{path.name}-{container['name']}", container
    domain = ComputeDomain(
        uid="cd-1",
        name="job",
        namespace="team",
        num_nodes=2,
        template="channel",
        allocation_mode=AllocationMode.SINGLE,
    )
    settings = ControllerSettings(daemon=ImexDaemonSettings(image="rackloom:0.1.0"))
    made = manifests.daemon_set(domain, settings, settings.daemon_namespace)
    for container in made["spec"]["template"]["spec"]["containers"]:
        yield f"daemon-{container['name']}", container


CONTAINERS = [pytest.param(container, id=name) for name, container in containers()]


@pytest.mark.parametrize("container", CONTAINERS)
def test_what_a_container_runs_is_on_the_path_of_the_image(own, container):
    """A runtime starts containers and exec probes without a shell, by the PATH of the image."""
    probes = [value for key, value in container.items() if key.endswith("Probe")]
    hooks = list(container.get("lifecycle", {}).values())
    started = [container.get("command", build.CONFIG["Entrypoint"])]
    started += [probe["exec"]["command"] for probe in probes + hooks if "exec" in probe]
    environment = dict(variable.split("=", 1) for variable in build.CONFIG["Env"])
    for command in started:
        at = [f"{folder}/{command[0]}".lstrip("/") for folder in environment["PATH"].split(":")]
        found = [own[path] for path in at if path in own]
        assert found, f"{command[0]} is not in {environment['PATH']}"
        assert found[0].mode & 0o111


def test_the_image_of_the_manifests_is_the_one_that_is_built():
    version = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    assert build.NAMES["site"] == "rackloom"
    for path in (ROOT / "deploy").glob("*/*/kustomization.yaml"):
        for image in yaml.safe_load(path.read_text()).get("images", ()):
            assert (image["name"], image["newTag"]) == ("rackloom", version), path


def test_the_containerfile_starts_from_nothing_and_says_what_the_archive_says():
    lines = (ROOT / "deploy/site/Containerfile").read_text().splitlines()
    words = [line.split(maxsplit=1) for line in lines if line and line[0] not in "# "]
    assert [rest for word, rest in words if word == "FROM"] == ["scratch AS site", "site AS transfer", "site"]
    options = {word: rest for word, rest in words if word not in ("FROM", "ADD", "ARG")}
    assert options == {
        "ENV": build.CONFIG["Env"][0],
        "WORKDIR": build.CONFIG["WorkingDir"],
        "USER": build.CONFIG["User"],
        "VOLUME": " ".join(build.CONFIG["Volumes"]),
        "EXPOSE": " ".join(port.removesuffix("/tcp") for port in build.CONFIG["ExposedPorts"]),
        "ENTRYPOINT": '["rackloom"]',
        "CMD": '["serve", "--config", "/etc/rackloom/site.toml"]',
    }
    added = [
        re.fullmatch(r"build/image/\$\{TARGETARCH\}/(\w+)\.tar /", rest).group(1)
        for word, rest in words
        if word == "ADD"
    ]
    in_archive = [layer.name for layer in build.layers("amd64", "transfer")]
    assert sorted(added) == sorted([*in_archive, "rackloom"])


def test_the_build_backend_is_the_one_with_hashes():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    pins = (ROOT / "requirements/build.txt").read_text()
    (backend,) = project["build-system"]["requires"]
    assert f"{backend} \\\n    --hash=sha256:" in pins
    assert "build.txt" in re.search(
        r"-r requirements/dev\.txt -r (\S+)", (ROOT / "Makefile").read_text()
    ).group(1)


def test_what_a_builder_is_given_is_the_layers_alone():
    lines = (ROOT / ".dockerignore").read_text().splitlines()
    assert [line for line in lines if line[0] != "#"] == ["*", "!build/image/*/*.tar"]


def test_layers_are_made_again_when_an_input_or_the_program_changes(tmp_path, monkeypatch, umask):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    umask(0o027)
    made = []

    def layer(*inputs):
        return build.Layer(
            "debian", "arm64", inputs, lambda: made.append(inputs) or {"a.py": text("x = 1\n")}
        )

    first = layer("one").file()
    assert layer("one").file() == first
    assert layer("two").file() != first
    assert made == [("one",), ("two",)]
    for number in range(5):
        layer(str(number)).file()
    assert len(list(first.parent.iterdir())) == 4
    assert layer("4").path.stat().st_mode & 0o777 == 0o640
