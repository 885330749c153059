"""The drivers that have device numbers in /proc/devices."""

from hypothesis import given
from hypothesis import strategies as st

from rackloom.topology.discovery.sysfs import character_devices

HEAD = "Character devices:\n"


def test_only_character_devices_count():
    text = HEAD + "  1 mem\n235 nvidia-caps-imex-channels\n\nBlock devices:\n  8 sd\n"
    assert dict(character_devices(text)) == {1: "mem", 235: "nvidia-caps-imex-channels"}


@given(
    st.text(), st.lists(st.tuples(st.integers(0, 4095), st.from_regex(r"[a-z][a-z0-9-]*", fullmatch=True)))
)
def test_whatever_else_the_section_holds_the_devices_are_found(noise, devices):
    lines = [f"{major:3} {name}" for major, name in devices]
    assert list(character_devices(HEAD + "\n".join(lines))) == devices
    list(character_devices(HEAD + noise))
