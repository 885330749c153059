"""Commands on files of any content: an error that names the remedy, never a traceback."""

import os
from pathlib import Path

import pytest
from inline_snapshot import external_file

from rackloom.cli.main import app
from rackloom.errors import Misuse, Refused, Retry, Unknown

EXAMPLES = Path(__file__).parents[2] / "examples"
CLAIMS = str(EXAMPLES / "nixl-kv-transfer")
JOB = str(EXAMPLES / "whole-rack-job" / "job.yaml")
MACHINE = ("--profile", "azure-nd96isr-h100-v5")
NOWHERE = ("--site", "localhost:1")


COMMANDS = (
    ("place", "BAD", "--profile", "gb200-nvl72"),
    ("place", JOB, "--site", "BAD"),
    ("claim", "allocate", "-f", "BAD", *MACHINE),
    ("claim", "allocate", "-f", CLAIMS, "--slices", "BAD"),
    ("claim", "explain", "-f", "BAD", *MACHINE),
    ("claim", "check", "BAD", *MACHINE),
    ("claim", "check", CLAIMS, "--slices", "BAD"),
    ("claim", "template", "--gpus", "4", "--nics", "4", "--align", "numa", "--slices", "BAD"),
    ("topology", "show", "BAD"),
    ("topology", "classes", "BAD"),
    ("topology", "discover", "--declared", "BAD"),
    ("topology", "discover", "--nccl-topology", "BAD"),
    ("topology", "discover", "--sysroot", "BAD"),
    ("twin", "play", "BAD"),
    ("transfer", "report", "BAD"),
    ("transfer", "compare", "BAD", "BAD"),
    ("transfer", "baseline", "BAD", "baseline.json"),
    ("transfer", "gate", "BAD", "--baseline", "BAD"),
    ("transfer", "evidence", "BAD", "--nccl", "BAD"),
    ("transfer", "model", "BAD"),
    ("transfer", "run", "--claim", "BAD"),
    ("doctor", "--config", "BAD"),
    ("doctor", "--kubeconfig", "BAD"),
    ("doctor", "--sysroot", "BAD"),
    ("token", "--home", "BAD", "--org", "demo", "--role", "TENANT_ADMIN"),
    ("controller", "--image", "image", "--kubeconfig", "BAD"),
    ("webhook", "--kubeconfig", "BAD"),
    ("webhook-certificates", "--kubeconfig", "BAD"),
    ("up", "--home", "home", "--port", "0", "--kubeconfig", "BAD"),
    ("up", "--home", "BAD", "--port", "0", "--kubeconfig", "nowhere"),
    ("serve", "--config", "BAD"),
    ("admin", "machine", "import", "BAD", *NOWHERE),
    ("admin", "apply", "BAD", *NOWHERE),
    ("admin", "machine", "list", "--ca", "BAD", "--cert", "BAD", "--key", "BAD", *NOWHERE),
    ("admin", "credential", "add", "nmx-m", "--username", "operator", "--password-file", "BAD", *NOWHERE),
    ("uninstall", "--kubeconfig", "BAD"),
    ("node", "imex", "--node", "node", "--kubeconfig", "BAD"),
    ("node", "gpu", "--node", "node", "--kubeconfig", "BAD"),
    ("node", "nic", "--node", "node", "--kubeconfig", "BAD"),
)
CLAIM = "apiVersion: resource.k8s.io/v1\nkind: ResourceClaim\nmetadata: {name: x}\nspec: "
JOB_OF = "apiVersion: batch/v1\nkind: Job\nmetadata: {name: x}\nspec: "
TEXTS = {
    "broken.yaml": "a: [1,\n",
    "broken.json": '{"a": ',
    "broken.toml": "[database\n",
    "other-kind.yaml": "apiVersion: v1\nkind: ConfigMap\nmetadata: {name: x}\n",
    "no-kind.yaml": "a: 1\n",
    "a-list.json": "[1, 2]\n",
    "a-list.yaml": "- 1\n- {a: 2}\n",
    "a-string.yaml": '"just words"\n',
    "a-number.yaml": "123456789012345678901234567890\n",
    "null.yaml": "null\n",
    "no-number.yaml": "a: 0x_\n",
    "a-tag.yaml": '!!python/object/apply:os.system ["true"]\n',
    "a-loop.yaml": "a: &a [*a]\n",
    "deep.yaml": "[" * 5000,
    "deep.json": "[" * 5000 + "]" * 5000,
    "unknown-key.toml": "x = 1\n",
    "wrong-types.yaml": f"{CLAIM}{{devices: 5}}\n",
    "no-spec.yaml": "apiVersion: resource.k8s.io/v1\nkind: ResourceClaim\nmetadata: null\n",
    "negative.yaml": f"{JOB_OF}{{parallelism: -3, template: {{spec: {{containers: 3}}}}}}\n",
    "huge.yaml": f"{JOB_OF}{{parallelism: {10**30}, template: {{spec: {{containers: []}}}}}}\n",
    "\u2603.yaml": f"{CLAIM}{{devices: {{requests: [{{name: \u2603}}]}}}}\n",
}
each_command = pytest.mark.parametrize("words", COMMANDS, ids=lambda words: " ".join(words[:2]))


@pytest.fixture
def bad(tmp_path, monkeypatch):
    """A folder with every kind of unsuitable file."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    for name, text in TEXTS.items():
        (tmp_path / name).write_text(text, encoding="utf-8")
    (tmp_path / "binary").write_bytes(bytes(range(256)))
    (tmp_path / "empty").touch()
    (tmp_path / "directory").mkdir()
    return (*TEXTS, "binary", "empty", "directory", "missing", "empty/below", os.devnull, "")


def exit_of(words):
    """The exit code of a command, and its complaint. A foreign exception counts as a traceback."""
    try:
        code = app(list(words), result_action="return_value")
    except Refused as refused:
        return 2 if isinstance(refused, Misuse) else 1, (refused.reason, refused.nearest_fix)
    except (Retry, Unknown) as trouble:
        return 1, (trouble.reason, None)
    except SystemExit as ended:
        return ended.code, None
    return code or 0, None


@pytest.mark.slow
@each_command
def test_no_content_of_a_file_makes_a_traceback(words, bad, capsys):
    for name in bad:
        code, complaint = exit_of(name if word == "BAD" else word for word in words)
        assert code in (0, 1, 2), name
        if complaint is not None:
            assert complaint[0].strip(), name
            assert "Errno" not in complaint[0], name


MENDED = (
    ("place", "binary"),
    ("place", "missing"),
    ("place", "a-list.json"),
    ("twin", "play", "directory"),
    ("transfer", "run", "--claim", "no-number.yaml"),
    ("transfer", "run", "--claim", "missing"),
    ("doctor", "--kubeconfig", "a-list.yaml"),
    ("doctor", "--kubeconfig", "missing"),
    ("admin", "machine", "import", "broken.yaml"),
    ("admin", "machine", "import", "missing"),
    ("admin", "apply", "binary"),
    ("admin", "machine", "list", "--ca", "missing"),
    ("admin", "credential", "add", "nmx-m", "--username", "operator", "--password-file", "binary"),
)


def test_what_is_wrong_and_what_to_change(bad, capsys):
    transcript = []
    for words in MENDED:
        _, (reason, fix) = exit_of(words)
        transcript += [f"$ rackloom {' '.join(words)}", f"rackloom: {reason}", f"  fix: {fix}", ""]
    assert "\n".join(transcript) == external_file("transcripts/bad-input.txt")


@pytest.mark.parametrize(
    ("words", "number"),
    [
        (("place", JOB, "--profile", "gb200-nvl72", "--racks"), "99999999999"),
        (("claim", "allocate", "-f", CLAIMS, *MACHINE, "--nodes"), "99999999999"),
        (("claim", "explain", "-f", CLAIMS, *MACHINE, "--nodes"), "0"),
    ],
)
def test_machines_that_there_cannot_be_are_a_mistake_of_usage(words, number, capsys):
    assert exit_of((*words, number)) == (2, None)
    assert words[-1] in capsys.readouterr().err


def test_a_link_is_not_shaped_to_what_is_no_number():
    words = ("transfer", "run", "--emulate", "--rates", "nan", "1")
    assert exit_of(words) == (2, ("a link cannot be shaped to (nan, 1.0)", "give Gb/s from 0.001 to 1000"))


@pytest.mark.parametrize("words", [("controller", "--image", "image"), ("webhook",)], ids=" ".join)
def test_an_address_without_a_port_is_refused(words, bad):
    Path("kubeconfig").write_text(
        "current-context: a\n"
        "contexts: [{name: a, context: {cluster: a, user: a}}]\n"
        "clusters: [{name: a, cluster: {server: 'http://127.0.0.1:1'}}]\n"
        "users: [{name: a, user: {}}]\n"
    )
    listen = ("--kubeconfig", "kubeconfig", "--listen", "here")
    assert exit_of((*words, *listen)) == (1, ("'here' is not HOST:PORT", "write it as 127.0.0.1:8080"))
