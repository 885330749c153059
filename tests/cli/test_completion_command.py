"""The completion of a shell: bash runs it. zsh and fish are checked if they are installed."""

import os
import shutil
import subprocess
import sys

import pytest
from tests.client.conftest import site
from tests.waiting import PATIENCE

from rackloom.cli.main import app

__all__ = ["site"]

TRY = """
rackloom() {{ {python} -m rackloom.cli.main "$@"; }}
source {script}
COMP_WORDS=({words} ""); COMP_CWORD=$(({count})); COMP_LINE="{words} "; COMP_POINT=${{#COMP_LINE}}
_rackloom
printf '%s\\n' "${{COMPREPLY[@]}}"
"""


@pytest.fixture
def script(tmp_path, capsys):
    """Writes the completion of a shell and returns its file."""

    def write(shell):
        app(["completion", shell])
        file = tmp_path / shell
        file.write_text(capsys.readouterr().out)
        return file

    return write


def offered(script, site, *words):
    """The words that bash offers next."""
    text = TRY.format(python=sys.executable, script=script, words=" ".join(words), count=len(words))
    environment = {**os.environ, "RACKLOOM_HOME": str(site.home), "RACKLOOM_ORG": "completed"}
    ended = subprocess.run(
        ["bash", "-c", text], capture_output=True, text=True, timeout=PATIENCE, env=environment
    )
    assert ended.returncode == 0, ended.stderr
    return ended.stdout.split()


@pytest.mark.slow
def test_bash_offers_commands_options_and_names(script, site, monkeypatch):
    monkeypatch.setenv("RACKLOOM_HOME", str(site.home))
    file = script("bash")
    assert {"partition", "vpc", "doctor"} <= set(offered(file, site, "rackloom"))
    assert sorted(offered(file, site, "rackloom", "instance")) == ["create", "delete", "get", "list"]
    app(["partition", "create", "alpha", "--org", "completed"])
    try:
        assert offered(file, site, "rackloom", "partition", "get") == ["alpha"]
    finally:
        app(["partition", "delete", "alpha", "--org", "completed", "--wait"])


@pytest.mark.slow
@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_the_script_is_one_of_the_shell(script, shell):
    file = script(shell)
    assert "__complete" in file.read_text(), "names are asked for"
    program = shutil.which(shell)
    if program is None:
        pytest.skip(f"NO {shell.upper()}: its completion was made and not read by it")
    subprocess.run([program, "-n", str(file)], check=True, timeout=PATIENCE)
