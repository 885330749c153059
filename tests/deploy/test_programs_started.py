"""The manifests start our commands with options and variables that exist."""

from pathlib import Path

import pytest
import yaml

from rackloom.cli.main import app

ROOT = Path(__file__).parents[2]
IMAGES = ("rackloom", "rackloom-transfer")
OF_OTHERS = {"NVIDIA_VISIBLE_DEVICES"}
"""Read by NVIDIA's container runtime, not by us. Names that begin with RACKLOOM_ set site.toml values."""


CONTAINERS = [
    pytest.param(container, id=f"{path.parent.parent.name}-{container['name']}")
    for path in sorted([*ROOT.glob("deploy/*/*/*.yaml"), *ROOT.glob("examples/*/*.yaml")])
    for obj in yaml.safe_load_all(path.read_text())
    if obj and obj.get("kind") in ("Deployment", "DaemonSet", "Job", "Pod")
    for container in obj["spec"].get("template", obj)["spec"]["containers"]
    if container["image"] in IMAGES
]


def test_there_are_programs():
    assert len(CONTAINERS) >= 8


@pytest.mark.parametrize("container", CONTAINERS)
def test_its_arguments_and_variables_are_known(container, monkeypatch):
    given = {variable["name"]: variable.get("value", "given") for variable in container["env"]}
    for name, value in given.items():
        monkeypatch.setenv(name, value)
    app.parse_args(container["args"], print_error=False, exit_on_error=False)
    _, commands, _ = app.parse_commands(container["args"])
    options = commands[-1].assemble_argument_collection()
    known = {name for option in options for name in option.parameter.env_var or ()}
    settings = {name for name in given if name.startswith("RACKLOOM_")}
    assert given.keys() - OF_OTHERS - settings <= known
