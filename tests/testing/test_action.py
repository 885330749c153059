"""The GitHub Action: its inputs reach its scripts, and the scripts do the same here as on a runner."""

import json
import os
import re
import signal
import subprocess
import sys
import zipfile
from pathlib import Path

import httpx2
import pytest
import yaml
from tests.waiting import PATIENCE, until_seen

ROOT = Path(__file__).parents[2]
ACTION = ROOT / ".github/actions/rackloom"
DEFINITION = yaml.safe_load((ACTION / "action.yml").read_text())
STEPS = DEFINITION["runs"]["steps"]
SCENARIO = """
title = "A GPU falls off the bus"
seen = "a test"
[[step]]
do = "gpu-lost"
gpu = "rack-01/slot-1/gpu-0"
[[step]]
expect = "devices"
driver = "gpu.nvidia.com"
tray = "rack-01/slot-1"
count = 1
tainted = true
within = 300
"""


class Runner:
    """A job of a runner from the view of its scripts: their inputs, and the files that they write."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.files = {name: folder / name for name in ("GITHUB_OUTPUT", "GITHUB_ENV", "GITHUB_PATH")}
        for file in self.files.values():
            file.touch()
        self.path = str(Path(sys.executable).parent)

    def run(self, step: dict, inputs: dict[str, str]) -> subprocess.CompletedProcess:
        values = {name: str(spec.get("default", "")) for name, spec in DEFINITION["inputs"].items()} | inputs

        def filled(text: str) -> str:
            text = text.replace("${{ github.action_path }}", str(ACTION))
            return re.sub(r"\$\{\{ inputs\.(\w+) \}\}", lambda found: values[found[1]], text)

        env = {name: value for name, value in os.environ.items() if not name.startswith("RACKLOOM_")}
        env |= {name: filled(value) for name, value in step.get("env", {}).items()}
        env |= {name: str(file) for name, file in self.files.items()}
        env |= {"RUNNER_TEMP": str(self.folder), "PATH": f"{self.path}:{os.environ['PATH']}"}
        script = self.folder / "script.sh"
        script.write_text(filled(step["run"]))
        # The call of a runner for `shell: bash`.
        command = ["bash", "--noprofile", "--norc", "-eo", "pipefail", str(script)]
        return subprocess.run(command, env=env, capture_output=True, text=True, timeout=2 * PATIENCE)

    def outputs(self) -> dict[str, str]:
        lines = self.files["GITHUB_OUTPUT"].read_text().splitlines()
        return dict(line.split("=", 1) for line in lines)


@pytest.fixture
def runner(tmp_path):
    made = Runner(tmp_path)
    yield made
    pid = int(made.outputs().get("pid", 0))
    if pid:
        os.kill(pid, signal.SIGTERM)
        control = Path(made.outputs()["home"]) / "control.json"
        until_seen(lambda: not control.exists(), "the site ends")


def named(name):
    return next(step for step in STEPS if step["name"] == name)


def test_every_input_is_used_and_every_output_is_written():
    used = set(re.findall(r"inputs\.(\w+)", json.dumps(STEPS)))
    assert used == set(DEFINITION["inputs"])
    start = (ACTION / "start.sh").read_text()
    written = set(re.findall(r'echo "(\w+)=', start)) - {"RACKLOOM_ADDRESS", "RACKLOOM_HOME"}
    assert written == set(DEFINITION["outputs"])
    for name, spec in DEFINITION["outputs"].items():
        assert spec["value"] == f"${{{{ steps.start.outputs.{name} }}}}"
    assert all(os.access(ACTION / name, os.X_OK) for name in ("install.sh", "start.sh"))
    assert all("description" in spec for spec in DEFINITION["inputs"].values())


@pytest.mark.slow
def test_a_site_starts_and_outlives_the_step(runner, tmp_path):
    file = tmp_path / "lost.toml"
    file.write_text(SCENARIO)
    done = runner.run(named("Start"), {"seed": "7", "scenario": str(file)})
    assert done.returncode == 0, done.stdout + done.stderr
    outputs = runner.outputs()
    assert f"::add-mask::{outputs['token']}" in done.stdout
    assert "1 of 1 expectations observed" in done.stdout
    bearer = {"Authorization": f"Bearer {outputs['token']}"}
    answer = httpx2.get(f"{outputs['address']}/v2/org/demo/nico/site", headers=bearer, timeout=PATIENCE)
    assert answer.json()[0]["name"] == "twin"
    assert Path(outputs["kubeconfig"]).exists()
    assert f"RACKLOOM_HOME={outputs['home']}" in runner.files["GITHUB_ENV"].read_text()


@pytest.mark.slow
def test_what_cannot_start_fails_the_step_with_the_reason(runner):
    done = runner.run(named("Start"), {"profile": "gb200-nvl27"})
    assert done.returncode == 1
    assert "::error::the simulated site did not start" in done.stdout
    assert "gb200-nvl72" in done.stdout
    assert runner.outputs() == {}


def test_no_package_of_an_index_is_installed_by_default(runner):
    done = runner.run(named("Install"), {"python": sys.executable})
    assert done.returncode != 0
    assert "is the input package: a wheel of Rackloom" in done.stderr


@pytest.mark.slow
def test_the_package_is_installed_for_later_steps(runner, tmp_path):
    """A wheel without dependencies stands in: `make test-install` installs ours with all its dependencies."""
    wheel, info = tmp_path / "rackloom-0.0.1-py3-none-any.whl", "rackloom-0.0.1.dist-info"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr("stand_in.py", "def main():\n    print('0.0.1')\n")
        archive.writestr(f"{info}/METADATA", "Metadata-Version: 2.1\nName: rackloom\nVersion: 0.0.1\n")
        archive.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        archive.writestr(f"{info}/entry_points.txt", "[console_scripts]\nrackloom = stand_in:main\n")
        archive.writestr(f"{info}/RECORD", "")
    done = runner.run(named("Install"), {"package": str(wheel), "python": sys.executable})
    assert done.returncode == 0, done.stdout + done.stderr
    (bin_folder,) = runner.files["GITHUB_PATH"].read_text().splitlines()
    shown = subprocess.run([f"{bin_folder}/rackloom"], capture_output=True, text=True, check=True)
    assert shown.stdout == "0.0.1\n"
