"""The program as a whole: its list of commands, and `--help` for each of them."""

import os
import pty
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from tests.cli.command_tree import LEAVES, arguments, each_leaf
from tests.waiting import PATIENCE

from rackloom import __version__
from rackloom.cli.main import COMMANDS, app

RACKLOOM = [sys.executable, "-m", "rackloom.cli.main"]


def rackloom(*arguments):
    """The program's output in plain text, on lines that are wide enough for its sentences."""
    wide = {**os.environ, "COLUMNS": "200"}
    wide.pop("FORCE_COLOR", None)
    return subprocess.run([*RACKLOOM, *arguments], capture_output=True, text=True, timeout=PATIENCE, env=wide)


def test_every_command_is_listed_with_what_it_does():
    listed = rackloom("--help").stdout
    for name, _, what in COMMANDS:
        assert name in listed
        assert what in listed


@pytest.mark.slow
def test_help_and_version_are_words_as_well_as_options():
    assert rackloom("version").stdout == f"{__version__}\n" == rackloom("--version").stdout
    assert rackloom("help").stdout == rackloom("--help").stdout == rackloom().stdout
    assert rackloom("help", "vpc", "create").stdout == rackloom("vpc", "create", "--help").stdout


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name, _, _ in COMMANDS])
def test_every_command_can_be_asked_for_help(name):
    asked = rackloom(name, "--help")
    assert asked.returncode == 0
    assert f"Usage: rackloom {name}" in asked.stdout


def ended(*words):
    """The exit code of a command that ends before it begins."""
    with pytest.raises(SystemExit) as end:
        app(words)
    return end.value.code


def test_there_are_commands_below_commands():
    assert {("place",), ("admin", "machine", "nvlink-info", "show"), ("transfer", "model")} <= set(LEAVES)


@pytest.mark.slow
@each_leaf
def test_each_command_is_listed_with_what_it_does_and_can_be_asked_for_help(words, capsys):
    app([*words[:-1], "--help"], result_action="return_value")
    assert re.search(rf"│ {words[-1]} +\w", capsys.readouterr().out)
    app([*words, "--help"], result_action="return_value")
    assert f"Usage: rackloom {' '.join(words)}" in capsys.readouterr().out


@each_leaf
def test_mistakes_of_usage_end_with_2(words, capsys, monkeypatch):
    required = [argument for argument in arguments(words) if argument.required]
    for variable in (name for argument in required for name in argument.parameter.env_var or ()):
        monkeypatch.delenv(variable, raising=False)
    assert ended(*words, "--no-such-option") == 2
    assert capsys.readouterr().err
    if required:
        assert ended(*words) == 2
        assert capsys.readouterr().err


def test_a_command_that_is_asked_for_help_tells_all_of_it():
    asked = rackloom("place", "--help").stdout
    assert "A job that does not fit is refused, with the blockers and the nearest fix" in asked
    assert "Place whole jobs" not in asked


def test_an_unknown_command_is_a_usage_error():
    refused = rackloom("carve")
    assert refused.returncode == 2
    assert 'Unknown command "carve"' in refused.stdout + refused.stderr


def test_what_is_refused_says_why_and_what_to_change_on_stderr():
    refused = rackloom("topology", "show", "gb200")
    assert refused.returncode == 1
    assert refused.stdout == ""
    assert refused.stderr.startswith("rackloom: no ")
    assert "\n  fix: use gb200-nvl" in refused.stderr


@pytest.mark.parametrize(
    ("settings", "first"),
    [
        ({"TERM": "xterm"}, "\x1b[31mrackloom:\x1b[0m no "),
        ({"TERM": "xterm", "NO_COLOR": "1"}, "rackloom: no "),
        ({"TERM": "dumb"}, "rackloom: no "),
    ],
)
def test_errors_are_coloured_on_a_terminal_that_wants_it(settings, first):
    ours, theirs = pty.openpty()
    plain = {name: value for name, value in os.environ.items() if name not in ("NO_COLOR", "TERM")}
    command = [*RACKLOOM, "topology", "show", "gb200"]
    done = subprocess.run(
        command, stdout=subprocess.PIPE, stderr=theirs, timeout=PATIENCE, env=plain | settings
    )
    os.close(theirs)
    assert os.read(ours, 1000).decode().startswith(first)
    os.close(ours)
    assert (done.returncode, done.stdout) == (1, b"")


def test_listing_commands_imports_none_of_them():
    code = "import sys, rackloom.cli.main; print([m for m in sys.modules if m.startswith('rackloom.')])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=PATIENCE)
    assert not any(
        room in done.stdout for room in ("rackloom.carve", "rackloom.claim", "rackloom.app", "rackloom.prove")
    )


def test_a_job_that_fits_loads_nothing_that_explains_moves_or_packs():
    job = Path(__file__).parents[2] / "examples" / "imex-mpijob" / "mpijob.yaml"
    code = (
        "import sys; from rackloom.cli.main import app;"
        f"app(['place', {str(job)!r}, '--profile', 'gb200-nvl72', '--racks', '2']); print(list(sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=PATIENCE)
    assert "rackloom.core.place.gang_planner" in done.stdout
    for module in ("gang_fixes", "rendering", "pod_templates", "claim_capacity"):
        assert f"rackloom.core.place.{module}" not in done.stdout
    assert "rackloom.core.allocate.objects" in done.stdout
    assert "rackloom.core.allocate.cel" not in done.stdout
    assert "cel_expr_python" not in done.stdout


def test_the_version_is_told_without_typesetting():
    code = (
        "import atexit, sys; from rackloom.cli.main import main; sys.argv = ['rackloom', '--version'];"
        "atexit.register(lambda: print([name for name in sys.modules if name.startswith('rich')])); main()"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=PATIENCE)
    assert (done.returncode, done.stdout) == (0, f"{__version__}\n[]\n")


def loaded_by(*words):
    """The modules that a command loads, and perhaps words that it prints."""
    code = (
        "import atexit, sys; from rackloom.cli.main import main; sys.argv[:1] = ['rackloom'];"
        "atexit.register(lambda: print(*sys.modules)); main()"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, *words], capture_output=True, text=True, timeout=PATIENCE
    )
    assert "Traceback" not in done.stderr
    return done.stdout.splitlines()[-1].split()


@pytest.mark.parametrize(
    ("words", "most"),
    [
        (("--help",), 125),
        (("doctor",), 225),
        (("doctor", "--home", "."), 300),
        (("instance", "list"), 205),
        (("partition", "--help"), 270),
        (("vpc", "list", "--help"), 280),
        (("instance", "create", "--help"), 280),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, tuple) else "",
)
def test_a_command_that_finds_no_site_loads_few_modules(words, most, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("RACKLOOM_HOME", str(tmp_path))
    loaded = loaded_by(*words)
    assert ("cyclopts" in loaded) is (words != ("--help",))
    assert len(loaded) <= most
    libraries = {"sqlalchemy", "pydantic", "starlette", "lightkube", "structlog", "jwt", "markdown_it"}
    assert not (libraries | {"httpx2"}) & {*loaded}


def test_a_tenant_command_that_sends_requests_loads_no_event_loop():
    loaded = loaded_by("vpc", "list", "--url", "http://127.0.0.1:1", "--token-file", "missing")
    assert "httpx2" in loaded
    assert not {"asyncio", "tomllib", "pydantic", "sqlalchemy"} & {*loaded}


def test_the_list_of_commands_is_the_help_of_cyclopts_in_plain_text(capsys):
    app(["--help"], result_action="return_value")
    for words in ([], ["help"], ["-h"], ["--help"]):
        listed = rackloom(*words).stdout
        assert listed.startswith("Usage: rackloom COMMAND\n\nOne control plane")
    known = re.findall(r"│ ([a-z-]{2,}) +\w", capsys.readouterr().out)
    assert re.findall(r"^  ([a-z-]+)  +\w", listed, re.MULTILINE) == [
        name for name in known if not name.startswith("-")
    ]


def test_claims_without_patterns_load_nothing_that_reads_patterns():
    claims = Path(__file__).parents[2] / "examples" / "nixl-kv-transfer"
    code = (
        "import sys; from rackloom.cli.main import app;"
        f"app(['claim', 'allocate', '--profile', 'gb200-nvl72', '--file', {str(claims)!r}]);"
        "print(list(sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=PATIENCE)
    assert "'rackloom.core.allocate.cel'" in done.stdout
    assert "rackloom.core.allocate.cel.regex" not in done.stdout
    assert "'re2'" not in done.stdout


def test_claims_load_what_they_use_and_no_more():
    claims = Path(__file__).parents[2] / "examples" / "nixl-kv-transfer"
    code = "import sys; from rackloom.cli.main import app; app(sys.argv[1:]); print(list(sys.modules))"

    def loaded(*words: str) -> str:
        command = [sys.executable, "-c", code, "claim", *words]
        done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE)
        assert done.returncode == 0, done.stderr
        return done.stdout

    listed = loaded("--help")
    for module in ("markdown_it", "pygments", "cel_expr_python", "rackloom.core", "yaml"):
        assert f"'{module}" not in listed
    allocated = loaded("allocate", "--profile", "gb200-nvl72", "--file", str(claims))
    assert "'rackloom.core.allocate.fleet'" in allocated
    for module in (
        "core.allocate.lint",
        "core.allocate.templates",
        "core.allocate.best",
        "core.allocate.checker",
    ):
        assert f"'rackloom.{module}" not in allocated
    for module in ("markdown_it", "rich.markdown", "re2", "numpy", "grpc"):
        assert f"'{module}'" not in allocated


@pytest.mark.parametrize("unbuffered", ["", "1"], ids=["in blocks", "at once"])
def test_a_reader_that_has_seen_enough_is_no_error(unbuffered):
    process = subprocess.Popen(
        [*RACKLOOM, "topology", "list"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONUNBUFFERED": unbuffered},
    )
    process.stdout.close()
    assert process.stderr.read() == ""
    process.stderr.close()
    process.wait(PATIENCE)


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no /dev/full here")
@pytest.mark.parametrize("words", [("topology", "list"), ("--help",)], ids=" ".join)
def test_a_full_disk_is_told(words):
    with Path("/dev/full").open("w") as full:
        done = subprocess.run(
            [*RACKLOOM, *words], stdout=full, stderr=subprocess.PIPE, text=True, timeout=PATIENCE
        )
    assert done.returncode == 1
    assert done.stderr == (
        "rackloom: what this writes has no room: No space left on device\n  fix: make room on that disk\n"
    )


def test_a_closed_output_is_no_error():
    closed = f"{shlex.join([*RACKLOOM, 'topology', 'list'])} >&-"
    done = subprocess.run(["sh", "-c", closed], stderr=subprocess.PIPE, text=True, timeout=PATIENCE)
    assert (done.returncode, done.stderr) == (0, "")


def test_a_complaint_that_nobody_reads_is_not_printed_as_an_answer():
    closed = f"{shlex.join([*RACKLOOM, 'topology', 'show', 'nowhere'])} 2>&-"
    done = subprocess.run(["sh", "-c", closed], stdout=subprocess.PIPE, text=True, timeout=PATIENCE)
    assert (done.returncode, done.stdout) == (1, "")
