"""Which device numbers the kernel has given to which driver: the text of /proc/devices."""

import re
from collections.abc import Iterator

IMEX_CHANNELS = "nvidia-caps-imex-channels"
"""NVIDIA's driver's name for the devices of IMEX channels."""
_MAJOR = re.compile(r"[0-9]{1,7}")


def character_devices(text: str) -> Iterator[tuple[int, str]]:
    """(major, name) of the character devices section."""
    section = text.partition("Character devices:\n")[2].partition("\n\n")[0]
    for line in section.splitlines():
        major, _, name = line.strip().partition(" ")
        if _MAJOR.fullmatch(major):
            yield int(major), name
