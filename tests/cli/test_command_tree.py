"""Rules that hold for every command: one set of flags, each with one name, one meaning, and a help text."""

import re
import subprocess
import sys
from pathlib import Path

import pytest
from tests.cli.command_tree import LEAVES, Words, arguments, names, of_every_command
from tests.waiting import PATIENCE

from rackloom.cli.main import app
from rackloom.errors import Misuse

PROGRAMS: set[Words] = {
    ("up",),
    ("serve",),
    ("controller",),
    ("webhook",),
    ("node", "nic"),
    ("node", "gpu"),
    ("node", "imex"),
    ("node", "all"),
    ("node", "mps"),
    ("imex", "run"),
    ("transfer", "serve"),
    ("topology", "slurm"),
}
"""They run until they are stopped."""
FIXED_FORM: set[Words] = {
    ("crds",),
    ("completion",),
    ("twin", "schema"),
    ("admin", "browse"),
    ("admin", "machine", "nvlink-info", "populate"),
    ("admin", "audit", "export"),
    ("claim", "node-group"),
}
"""They print a document that has one form: YAML of Kubernetes, a script, a schema, JSON."""
WRITERS: set[Words] = {
    ("examples",),
    ("transfer", "baseline"),
    ("transfer", "evidence"),
    ("nixl", "install"),
    ("webhook-certificates",),
}
"""Their result is a set of files, an installed package, or a certificate in a Secret."""
TAKES_FILES: set[Words] = {
    ("place",),
    ("claim", "check"),
    ("claim", "allocate"),
    ("claim", "explain"),
    ("twin", "play"),
    ("admin", "apply"),
    ("admin", "machine", "import"),
    ("admin", "import", "nico", "apply"),
    ("admin", "import", "nico", "rollback"),
}
"""They work on a manifest, a plan, or a list."""
READS_A_CLUSTER: set[Words] = {
    ("up",),
    ("doctor",),
    ("claim", "allocate"),
    ("claim", "explain"),
    ("claim", "template"),
    ("claim", "node-group"),
    ("place",),
    ("controller",),
    ("webhook",),
    ("webhook-certificates",),
    ("uninstall",),
    ("node", "nic"),
    ("node", "gpu"),
    ("node", "imex"),
    ("node", "all"),
    ("imex", "run"),
    ("topology", "slurm"),
}
JOB = """
apiVersion: batch/v1
kind: Job
metadata: {name: train}
spec: {parallelism: 1, template: {spec: {containers: []}}}
"""
SHORT = {
    "-o": "--output",
    "-f": "--file",
    "-q": "--quiet",
    "-v": "--verbose",
    "-w": "--watch",
    "-n": "--namespace",
}
OF_UPSTREAM = {"-n": "--name", "-t": "--tenant", "-i": "--instance"}
"""Options of `rackloom admin`, which has the short flags of upstream's operator program."""


def test_the_lists_of_this_file_name_commands_that_there_are() -> None:
    assert set(LEAVES) >= PROGRAMS | FIXED_FORM | WRITERS | TAKES_FILES | READS_A_CLUSTER


@of_every_command
def test_every_command_can_say_less_and_more(words: Words) -> None:
    assert {"--quiet", "-q", "--verbose", "-v"} <= names(words)


@of_every_command
def test_what_prints_data_prints_it_for_programs_too(words: Words) -> None:
    flags = {"--output", "-o", "--json"}
    if words in PROGRAMS | FIXED_FORM | WRITERS:
        assert not flags & names(words)
    else:
        assert flags <= names(words)


@of_every_command
def test_files_are_given_with_f_and_a_cluster_as_to_kubectl(words: Words) -> None:
    flags = names(words)
    assert ("-f" in flags) == (words in TAKES_FILES)
    assert ({"--kubeconfig", "--context"} <= flags) == (words in READS_A_CLUSTER)
    assert ("--kubeconfig" in flags) == ("--context" in flags)
    assert ("--namespace" in flags) <= ("-n" in flags)


@of_every_command
def test_a_short_flag_means_the_same_everywhere(words: Words) -> None:
    known = SHORT | (OF_UPSTREAM if words[0] == "admin" else {})
    for argument in arguments(words):
        for short in (name for name in argument.names if re.fullmatch(r"-\w", name)):
            assert known[short] in argument.names


@of_every_command
def test_every_flag_says_what_it_is_for(words: Words) -> None:
    for argument in arguments(words):
        if argument.names and argument.show and argument.parse:
            assert (argument.parameter.help or "").strip(), argument.names


@pytest.mark.parametrize(
    "flags", [("-q", "-v"), ("-o", "yaml", "--json"), ("-o", "xml"), ("--output",)], ids=" ".join
)
def test_contradictions_and_formats_that_there_are_not_end_with_2(flags: tuple[str, ...]) -> None:
    command = [sys.executable, "-m", "rackloom.cli.main", "topology", "list", *flags]
    done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr


@pytest.mark.parametrize("flag", ["--json", "-o json"])
def test_json_is_another_name_for_the_format(flag: str, capsys: pytest.CaptureFixture[str]) -> None:
    app(["topology", "list", *flag.split()], result_action="return_value")
    assert capsys.readouterr().out.startswith("[\n  {")


MISUSED = (
    "up --context lab",
    "twin play switch-dark --on . --home .",
    "instance list --watch -o json",
    "partition list --url https://site.example",
    "claim template --gpus 1 --nics 1 --align numa",
    "place",
    "place job.yaml --profile gb200-nvl72 --cluster",
    "transfer run --emulate --target localhost:1",
    "transfer run --block-size much",
    "transfer serve --listen here",
    "transfer evidence record.json",
    "admin machine list",
    "admin partition adopt --domain d --name n --reason r",
    "topology list -q -v",
    "topology list -o yaml --json",
)


@pytest.mark.parametrize("line", MISUSED)
def test_what_a_command_line_lacks_or_contradicts_is_a_mistake_of_usage(
    line: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "job.yaml").write_text(JOB)
    (tmp_path / "record.json").write_text("{}")
    for variable in ("RACKLOOM_ADMIN_CA", "RACKLOOM_TOKEN_FILE", "RACKLOOM_TRANSFER_SECRET"):
        monkeypatch.delenv(variable, raising=False)
    with pytest.raises(Misuse):
        app(line.split(), result_action="return_value")
