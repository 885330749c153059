"""Whether NIXL is installed, the reason if not, and the command that adds it."""

import pytest

from rackloom.errors import Refused
from rackloom.prove.transfer import installation


def nothing(_name: str) -> None:
    return None


@pytest.mark.parametrize(
    ("system", "machine", "supported"),
    [
        ("Linux", "x86_64", True),
        ("Linux", "aarch64", True),
        ("Linux", "ppc64le", False),
        ("Darwin", "arm64", False),
    ],
)
def test_where_there_are_wheels(system: str, machine: str, supported: bool) -> None:
    reason = installation.unsupported_reason(system, machine)
    assert (reason is None) == supported
    assert reason is None or reason.endswith(f"not for {system} on {machine}")


def test_what_is_not_installed_names_the_command_that_installs_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(installation, "find_spec", nothing)
    assert installation.nixl_missing_reason() == "NIXL is not installed; `rackloom nixl install` adds it"


def test_pip_of_this_environment_is_preferred() -> None:
    command = installation.installer_command("/venv/python", has_pip=True, which=nothing)
    assert command[:4] == ("/venv/python", "-m", "pip", "install")
    assert {"--no-deps", "--require-hashes"} <= set(command)
    assert command[-1].endswith("requirements/nixl.txt")


def test_without_pip_uv_installs_into_this_environment() -> None:
    command = installation.installer_command("/venv/python", has_pip=False, which=lambda name: f"/bin/{name}")
    assert command[:5] == ("/bin/uv", "pip", "install", "--python", "/venv/python")


def test_without_both_it_says_what_to_do() -> None:
    with pytest.raises(Refused, match="no pip") as refused:
        installation.installer_command("/venv/python", has_pip=False, which=nothing)
    assert "install uv" in str(refused.value.nearest_fix)


def test_an_incomplete_installation_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(installation, "_REQUIREMENTS", "requirements/absent.txt")
    with pytest.raises(Refused, match=r"absent\.txt is missing"):
        installation.installer_command("/venv/python", has_pip=True)
