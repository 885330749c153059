"""The source of the binaries, and the message if there are none. Nothing is built here."""

from pathlib import Path

import pytest
from tests.cluster import build
from tests.cluster.build import CONTROL_PLANE, NotBuilt, Tools


@pytest.fixture(autouse=True)
def empty_cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv(build.CACHE, str(tmp_path / "cache"))
    monkeypatch.delenv(build.ASSETS, raising=False)


def put(folder: Path, *names: str) -> Path:
    folder.mkdir(parents=True)
    for name in names:
        (folder / name).touch(mode=0o755)
    return folder


def test_named_binaries_are_used(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assets = put(tmp_path / "assets", *CONTROL_PLANE.packages)
    monkeypatch.setenv(build.ASSETS, str(assets))
    assert build.made(CONTROL_PLANE) == assets


def test_named_binaries_must_be_complete(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assets = put(tmp_path / "assets", "etcd", "kube-apiserver")
    monkeypatch.setenv(build.ASSETS, str(assets))
    with pytest.raises(
        NotBuilt, match="lacks kube-scheduler, kube-controller-manager: add them, or unset it"
    ):
        build.made(CONTROL_PLANE)


def test_built_binaries_are_kept_by_their_pins(tmp_path: Path) -> None:
    module = tmp_path / "module"
    module.mkdir()
    (module / "go.mod").write_text("one")
    tools = Tools(module, {"program": "."})
    assert build.at_hand(tools) is None
    folder = put(tools.folder, "program")
    assert build.made(tools) == folder
    (module / "go.mod").write_text("two")
    assert build.at_hand(tools) is None


def test_without_go_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(NotBuilt, match="there is no Go to build a cluster with: install Go"):
        build.made(CONTROL_PLANE)


def test_sources_are_asked_for_where_a_build_needs_them_and_the_refusal_is_told(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    go = tmp_path / "go"
    go.write_text('#!/bin/sh\necho "$@" >"$0.asked"\necho "go: no such proxy" >&2\nexit 1\n')
    go.chmod(0o755)
    tools = Tools(tmp_path, {"program": "example.test/program"})
    with pytest.raises(NotBuilt, match="no sources of program: go: no such proxy"):
        build.download(tools)
    assert (tmp_path / "go.asked").read_text() == "list -mod=readonly -deps example.test/program\n"
    put(tools.folder, "program")
    build.download(tools)


def test_a_word_that_it_does_not_know_builds_nothing() -> None:
    with pytest.raises(NotBuilt, match="--down: say nothing, --download or helm"):
        build.main(["--down"])


def test_a_server_reports_the_version_that_is_pinned() -> None:
    stamps = build.stamps("require (\n\tk8s.io/kubernetes v1.36.4\n)")
    assert "-X k8s.io/component-base/version.gitVersion=v1.36.4" in stamps
    assert "-X k8s.io/client-go/pkg/version.gitMinor=36" in stamps
    assert build.stamps("module without a server") == ""


def test_a_version_without_pins_is_named_with_those_that_have_some(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv(build.MINOR, "1.33")
    with pytest.raises(
        NotBuilt, match=r"no pins for RACKLOOM_KUBERNETES=1\.33: there are 1\.34, 1\.35, 1\.37"
    ):
        build.made(Tools(build.HERE / "kubernetes-1.33", CONTROL_PLANE.packages))
