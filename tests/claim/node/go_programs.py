"""Go programs of the tests, which call upstream's own packages."""

import shutil
from pathlib import Path

import pytest
from tests.cluster.build import NotBuilt, Tools, at_hand, download, made


def go_program(tools: Tools, binary: str, why: str) -> Path:
    """The program, built if it is missing. Skips if there is no Go, or no sources for it."""
    if at_hand(tools) is None:
        if shutil.which("go") is None:
            pytest.skip(f"NEEDS GO: {why} is built with it")
        try:
            download(tools)
        except NotBuilt as error:
            pytest.skip(f"NEEDS THE GO MODULE PROXY, or the modules of {binary}: {error}")
    return made(tools) / binary
