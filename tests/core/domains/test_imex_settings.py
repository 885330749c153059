"""The settings of nvidia-imex that an operator may choose, and the refusals with their fixes."""

from pathlib import PurePath

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rackloom.claim.imex.config import ImexConfig, ImexTls, config_text
from rackloom.core.domains.imex_settings import (
    IMEX_SETTING_DEFAULTS,
    imex_settings_text,
    read_imex_settings,
)
from rackloom.errors import Refused

CHOSEN = st.fixed_dictionaries(
    {},
    optional={
        "LOG_LEVEL": st.integers(0, 4).map(str),
        "IMEX_WAIT_FOR_QUORUM": st.sampled_from(["RECOVERY", "NONE"]),
        "IMEX_NODE_DISCONNECTED_GRACE_TIME": st.integers(-1, 2**31 - 1).map(str),
    },
)


def written(mode="dns", tls=None, **settings):
    config = ImexConfig("10.0.0.7", PurePath("/imexd/nodes.cfg"), tls, mode, settings=settings)
    return dict(line.split("=", 1) for line in config_text(config).splitlines())


def refusal(text):
    with pytest.raises(Refused) as refused:
        read_imex_settings(text)
    return str(refused.value)


@given(CHOSEN)
def test_what_is_chosen_reaches_the_file_and_nothing_else_changes(settings):
    read = read_imex_settings(imex_settings_text(settings))
    assert read == settings
    assert written(**read) == written() | settings


def test_nothing_chosen_is_what_rackloom_writes():
    assert read_imex_settings("") == read_imex_settings(" , ") == {}
    assert {name: written()[name] for name in IMEX_SETTING_DEFAULTS} == IMEX_SETTING_DEFAULTS
    assert read_imex_settings(imex_settings_text(IMEX_SETTING_DEFAULTS)) == IMEX_SETTING_DEFAULTS


def test_spaces_around_names_and_values_do_not_count():
    assert read_imex_settings(" LOG_LEVEL = 3 , IMEX_WAIT_FOR_QUORUM=NONE,") == {
        "LOG_LEVEL": "3",
        "IMEX_WAIT_FOR_QUORUM": "NONE",
    }


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("LOG_LEVEL=5", "LOG_LEVEL is '5', not 0 to 4"),
        ("LOG_LEVEL=", "LOG_LEVEL is ''"),
        ("LOG_LEVEL", "LOG_LEVEL is ''"),
        ("LOG_LEVEL=04", "LOG_LEVEL is '04'"),
        ("LOG_LEVEL=٣", "LOG_LEVEL is '٣'"),
        ("LOG_LEVEL=INFO", "LOG_LEVEL is 'INFO'"),
        ("IMEX_NODE_DISCONNECTED_GRACE_TIME=-2", "not -1 to 2147483647"),
        ("IMEX_NODE_DISCONNECTED_GRACE_TIME=1.5", "not -1 to 2147483647"),
        ("IMEX_NODE_DISCONNECTED_GRACE_TIME=2147483648", "not -1 to 2147483647"),
        ("IMEX_WAIT_FOR_QUORUM=FULL", "IMEX_WAIT_FOR_QUORUM is 'FULL', not RECOVERY or NONE"),
        ("LOG_LEVEL=1,LOG_LEVEL=2", "LOG_LEVEL is set twice"),
        ("log_level=3", "nvidia-imex has no option 'log_level'"),
        ("=3", "nvidia-imex has no option ''"),
    ],
)
def test_what_nvidia_imex_does_not_take_is_refused(text, words):
    message = refusal(text)
    assert words in message
    assert "settings that may be chosen: LOG_LEVEL (0 to 4), " in message


@pytest.mark.parametrize(
    ("option", "way_out"),
    [
        ("IMEX_ENABLE_AUTH_ENCRYPTION", "--no-daemon-authentication"),
        ("IMEX_SERVER_CERT", "--no-daemon-authentication"),
        ("IMEX_SECURITY_TARGET_OVERRIDE", "--no-daemon-authentication"),
        ("BIND_INTERFACE_IP", "the address of its pod"),
        ("IMEX_CMD_BIND_INTERFACE_IP", "the address of its pod"),
        ("SERVER_PORT", "open ports 50000 and 50005"),
        ("IMEX_NODE_CONFIG_FILE", "--max-nodes-per-imex-domain"),
        ("LOG_FILE_NAME", "the container's log"),
        ("IMEX_GSS_TIMEOUT_SEC", "GSSAPI"),
    ],
)
def test_what_is_rackloom_s_is_refused_with_the_way_to_its_effect(option, way_out):
    message = refusal(f"{option}=1")
    assert f"{option} is Rackloom's: " in message
    assert way_out in message


@pytest.mark.parametrize("tls", [None, ImexTls(PurePath("/tls"), "imex-cd")])
@pytest.mark.parametrize("mode", ["dns", "ip"])
def test_each_option_that_is_written_may_be_chosen_or_is_rackloom_s(tls, mode):
    for option in written(mode, tls).keys() - IMEX_SETTING_DEFAULTS.keys():
        assert f"{option} is Rackloom's: " in refusal(f"{option}=0")


def test_all_problems_are_reported_at_once():
    message = refusal("LOG_LEVEL=9,SERVER_PORT=1,COLOUR=red")
    assert all(name in message for name in ("LOG_LEVEL is '9'", "SERVER_PORT is Rackloom's", "'COLOUR'"))


@given(st.text() | CHOSEN.map(imex_settings_text).flatmap(lambda text: st.text().map(text.__add__)))
def test_no_text_adds_a_line_or_changes_an_option_of_rackloom(text):
    try:
        settings = read_imex_settings(text)
    except Refused:
        return
    changed = {name for name, value in written(**settings).items() if value != written()[name]}
    assert written(**settings).keys() == written().keys()
    assert changed <= IMEX_SETTING_DEFAULTS.keys()
