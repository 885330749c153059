"""The wheel alone, in an empty environment and an empty home, on each Python of this machine.

Packages come from the configured index: `make test-install` sets RACKLOOM_TEST_INSTALL. Interpreters that
are not here, and other systems, are checked by resolving wheels for them: that everything has one, not that
it runs.
"""

import os
import re
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
import yaml
from tests.install.commands import ASKED_BY, LIMIT, UV, output_of
from tests.install.interpreters import VERSIONS, interpreter

pytestmark = pytest.mark.skipif(
    ASKED_BY not in os.environ, reason=f"NO PLAIN INSTALLATION: `make test-install` makes it ({ASKED_BY})"
)
PLATFORMS = ("x86_64-unknown-linux-gnu", "aarch64-unknown-linux-gnu", "aarch64-apple-darwin")
WINDOWS = "x86_64-pc-windows-msvc"


@pytest.mark.parametrize("version", VERSIONS)
def test_the_demo_runs_from_the_wheel_alone(version: str, wheel: Path, tmp_path: Path) -> None:
    if (python := interpreter(version)) is None:
        pytest.skip(f"NO PYTHON {version} here: its wheels are only resolved")
    # By uv, which takes a second. test_isolated_builds.py and test_lessons.py install by pip.
    output_of(UV, "venv", "--quiet", "--python", python, tmp_path / "venv")
    bin_ = tmp_path / "venv/bin"
    output_of(UV, "pip", "install", "--quiet", "--python", bin_ / "python", wheel)
    home = tmp_path / "home"
    home.mkdir()
    printed = output_of(bin_ / "rackloom", "demo", home=home)
    assert "14 of 14 steps verified" in printed
    assert "not NIXL: NIXL is not installed; `rackloom nixl install` adds it" in printed
    crds = list(yaml.safe_load_all(output_of(bin_ / "rackloom", "crds", home=home)))
    assert {crd["kind"] for crd in crds} == {"CustomResourceDefinition"}
    assert list(home.iterdir()) == []


def test_nixl_comes_with_one_command(wheel: Path, tmp_path: Path) -> None:
    """By pip, and by uv into an environment that has no pip."""
    output_of(UV, "venv", "--quiet", "--python", sys.executable, tmp_path / "venv")
    python, rackloom = tmp_path / "venv/bin/python", tmp_path / "venv/bin/rackloom"
    output_of(UV, "pip", "install", "--quiet", "--python", python, wheel)
    assert "NIXL is not installed" in output_of(rackloom, "nixl", "status", rc=1)
    path = {"PATH": f"{UV.parent}:{os.environ['PATH']}"}
    printed = output_of(
        "env", *(f"{name}={value}" for name, value in path.items()), rackloom, "nixl", "install"
    )
    assert re.search(r"NIXL [\d.]+ is installed", printed)
    assert "torch" not in output_of(UV, "pip", "freeze", "--python", python)
    report = output_of(rackloom, "transfer", "run", "--block-size", "1MiB", home=tmp_path)
    assert "verified" in report


@pytest.mark.parametrize("platform", [*PLATFORMS, WINDOWS])
@pytest.mark.parametrize("version", VERSIONS)
def test_every_dependency_has_a_wheel(platform: str, version: str, wheel: Path) -> None:
    """Resolved, not run. On Windows the program refuses to run, but the resolver finds wheels."""
    command = [UV, "pip", "compile", "-q", "--python-platform", platform, "--python-version", version]
    done = subprocess.run(
        [*command, "--only-binary", ":all:", "-"],
        input=f"rackloom @ file://{wheel}",
        text=True,
        check=False,
        capture_output=True,
        timeout=LIMIT,
    )
    assert done.returncode == 0, done.stderr


def test_the_wheel_asks_for_ranges_and_takes_its_files_along(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
        (metadata,) = (name for name in names if name.endswith("METADATA"))
        needs = re.findall(r"^Requires-Dist: (.*)$", archive.read(metadata).decode(), re.MULTILINE)
    # Behind the semicolon are conditions, such as that of an extra.
    ranges = [need.partition(";")[0] for need in needs]
    assert ranges
    assert not [need for need in needs if "python_version" in need]
    assert not [wanted for wanted in ranges if "==" in wanted or "<" not in wanted or ">=" not in wanted]
    assert {"rackloom/py.typed", "rackloom/requirements/nixl.txt"} <= names
    assert any(name.startswith("rackloom/examples/") for name in names)
