"""A thread that answers doesn't wait long for a thread that computes."""

import subprocess
import sys

SHOWN = """
import sys
from rackloom.app.process import SWITCH_INTERVAL, shorten_switch_interval
before = sys.getswitchinterval()
shorten_switch_interval()
assert sys.getswitchinterval() == SWITCH_INTERVAL < before, (before, sys.getswitchinterval())
"""


def test_turns_are_shorter_than_those_of_python_itself():
    # In a separate process, because it is a setting of the whole process.
    subprocess.run([sys.executable, "-c", SHOWN], check=True, timeout=120)
