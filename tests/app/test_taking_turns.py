"""Whoever answers does not wait long for whoever computes."""

import subprocess
import sys

SHOWN = """
import sys
from rackloom.app.process import TURN, take_short_turns
before = sys.getswitchinterval()
take_short_turns()
assert sys.getswitchinterval() == TURN < before, (before, sys.getswitchinterval())
"""


def test_turns_are_shorter_than_those_of_python_itself():
    # In a process of its own: it is a setting of the whole process.
    subprocess.run([sys.executable, "-c", SHOWN], check=True, timeout=120)
