"""`rackloom controller`: options reach the controllers and IMEX daemons. Gang options are documented."""

import inspect
from pathlib import Path

import msgspec
import pytest

from rackloom.app import controller as process
from rackloom.app import imex as daemon_process
from rackloom.cli.controller import DaemonParameters, GangParameters, controller
from rackloom.cli.main import app
from rackloom.core.gangs.snapshot import GangSettings
from rackloom.errors import Refused

PAGE = Path(__file__).parents[2] / "docs" / "gangs.md"
RENAMED = {"again": "retry"}
"""Fields of the settings whose options have another name."""


@pytest.fixture
def started(monkeypatch):
    """Settings of gangs with which a controller was started."""
    found = []
    monkeypatch.setattr(
        process, "run_controller", lambda settings, gangs, options, announce: found.append(gangs)
    )
    return found


def option_of(field):
    return f"gang_{RENAMED.get(field, field)}"


def test_options_of_gangs_reach_the_controller(started):
    words = ["--gang-max-spares", "2", "--gang-clique-label", "topo/domain", "--gang-lost-after", "60"]
    app(["controller", "--image", "i:1", *words], result_action="return_value")
    (gangs,) = started
    assert gangs == GangSettings(max_spares=2, clique_label="topo/domain", lost_after=60.0)


def test_variables_of_a_deployment_do_too(started, monkeypatch):
    monkeypatch.setenv("GANG_CLIQUE_LABEL", "topo/domain")
    monkeypatch.setenv("GANG_MAX_SPARES", "0")
    app(["controller", "--image", "i:1"], result_action="return_value")
    (gangs,) = started
    assert gangs == GangSettings(clique_label="topo/domain", max_spares=0)


def test_what_nobody_can_mean_is_refused(started):
    with pytest.raises(Refused, match="max_spares"):
        controller(daemon=DaemonParameters(image="i:1"), gangs=GangParameters(gang_max_spares=-1))
    assert not started


@pytest.mark.parametrize(
    ("settings", "words"), [("LOG_LEVEL=9", "not 0 to 4"), ("SERVER_PORT=1", "SERVER_PORT is Rackloom's")]
)
def test_a_controller_does_not_start_with_settings_that_no_daemon_would_take(
    started, monkeypatch, settings, words
):
    monkeypatch.setenv("CD_DAEMON_IMEX_SETTINGS", settings)
    with pytest.raises(Refused, match=words):
        app(["controller", "--image", "i:1"], result_action="return_value")
    assert not started


def test_the_settings_of_nvidia_imex_reach_the_daemons():
    parameters = DaemonParameters(image="i:1", daemon_imex_settings="LOG_LEVEL=3, IMEX_WAIT_FOR_QUORUM=NONE")
    assert parameters.settings().imex_settings == {"LOG_LEVEL": "3", "IMEX_WAIT_FOR_QUORUM": "NONE"}


def test_a_daemon_reads_its_settings_again(monkeypatch):
    found = []
    monkeypatch.setattr(daemon_process, "run_imex", found.append)
    monkeypatch.setenv("IMEX_SETTINGS", "LOG_LEVEL=3")
    app(["imex", "run"], result_action="return_value")
    monkeypatch.setenv("IMEX_SETTINGS", "IMEX_ENABLE_AUTH_ENCRYPTION=0")
    with pytest.raises(Refused, match="IMEX_ENABLE_AUTH_ENCRYPTION is Rackloom's"):
        app(["imex", "run"], result_action="return_value")
    assert [options.settings for options in found] == [{"LOG_LEVEL": "3"}]


def test_each_setting_of_gangs_has_an_option_with_its_default_and_is_documented():
    options = inspect.signature(GangParameters).parameters
    for field in msgspec.structs.fields(GangSettings):
        option = option_of(field.name)
        default = options[option].default
        assert (
            tuple(filter(None, [default])) if isinstance(field.default, tuple) else default
        ) == field.default
        assert f"`--{option.replace('_', '-')}`" in PAGE.read_text()
