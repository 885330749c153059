"""The README's example runs and prints the shown output. The public names exist."""

import contextlib
import io
import re
import subprocess
import sys
from pathlib import Path

from rackloom.core import allocate

_README = Path(allocate.__file__).with_name("README.md")


def test_the_example_prints_what_the_readme_says() -> None:
    blocks = dict(re.findall(r"```(python|text)\n(.*?)```", _README.read_text(), re.DOTALL))
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        exec(blocks["python"], {})  # noqa: S102
    assert printed.getvalue() == blocks["text"]


def test_public_names_are_those_of_their_modules() -> None:
    assert dir(allocate) == sorted(allocate.__all__)
    assert all(getattr(allocate, name).__name__ == name for name in allocate.__all__ if name != "SearchMode")
    assert not hasattr(allocate, "nothing")


def test_objects_load_no_selector_and_no_search() -> None:
    code = (
        "import sys; from rackloom.core.allocate import Node, ResourceSlice;"
        "print([name for name in sys.modules if name.startswith(('rackloom', 're2', 'cel_expr'))])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip().strip("[]").replace("'", "").split(", ") == [
        "rackloom",
        "rackloom.core",
        "rackloom.core.allocate",
        "rackloom.core.allocate.objects",
    ]
