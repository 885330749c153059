"""Only `foreign_text` parses JSON, YAML, TOML and message packs of other systems."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

SRC = Path(__file__).parents[2] / "src/rackloom"
PARSERS = {
    "decode", "Decoder", "load", "loads", "load_all", "safe_load", "safe_load_all", "full_load", "parse",
    "compose", "json", "model_validate_json", "validate_json",
}  # fmt: skip
LIBRARIES = {"json", "msgspec", "yaml", "tomllib", "jwt", "pickle", "marshal", "orjson"}
TOKENS = "the library of tokens parses one, and RecursionError is caught"
OUR_OWN = "this program alone writes it"
ALLOWED = {
    "runtime/foreign_text.py": "it is the decoder",
    "runtime/yaml_events.py": "it is the decoder of YAML",
    "carve/observation/latest.py": f"columns of the site's database: {OUR_OWN}",
    "claim/node/slices.py": "the same function has just encoded it",
    "core/cluster/projection.py": "the same function has just encoded it",
    "claim/manifests/documents.py": "items of a list that the decoder has measured as a whole",
    "topology/profiles/__init__.py": "files of the package",
    "testing/child_process.py": "arguments and output of a child process that is this program",
    "web/history_file.py": f"the history of the map, compressed: {OUR_OWN}",
    "core/diagnosis/runbooks.py": "a file of the package",
    "app/demo/job.py": "a file of the package",
    "app/demo/tenants.py": "answers of the service in the same process",
    "app/twin/real_site.py": "answers of the service in the same process",
    "app/site/issuers.py": f"{TOKENS}; a head of 32 KiB bounds it",
    "carve/api/auth.py": f"{TOKENS}; a head of 32 KiB bounds it",
    "web/provider_sign_in.py": f"{TOKENS}; 1 MiB bounds the answer",
    "lab/scenario/virtual_site.py": "answers of the service in the same process",
    "carve/api/audit_middleware.py": "the framework has parsed it already, and keeps it",
}
SIMULATORS = "lab/"
"""Only this program and its tests are clients of these, except for user files that `lab/scenario` reads."""


def parsers_called(source: str) -> Iterator[int]:
    """The lines of a source that call a parser."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.ImportFrom) and node.module in LIBRARIES:
            if PARSERS & {name.name for name in node.names}:
                yield node.lineno
        elif isinstance(node, ast.Attribute) and node.attr in PARSERS:
            root: ast.expr = node
            while isinstance(root, ast.Attribute):
                root = root.value
            of_library = isinstance(root, ast.Name) and root.id in LIBRARIES
            # `.json` of an answer or a request, and not the module `msgspec.json`.
            if of_library if node.attr != "json" else not of_library:
                yield node.lineno


def is_allowed(path: str) -> bool:
    return path in ALLOWED or (path.startswith(SIMULATORS) and not path.startswith("lab/scenario/"))


def test_no_other_module_parses_what_another_system_wrote() -> None:
    found = {
        f"{path}:{line}"
        for file in sorted(SRC.rglob("*.py"))
        if not is_allowed(path := str(file.relative_to(SRC)))
        for line in parsers_called(file.read_text())
    }
    assert found == set(), "use rackloom.runtime.foreign_text, or name its writer in ALLOWED"


@pytest.mark.parametrize("path", ALLOWED)
def test_each_exception_is_needed(path: str) -> None:
    assert list(parsers_called((SRC / path).read_text()))


@pytest.mark.parametrize(
    "source",
    [
        "import msgspec\nmsgspec.json.decode(b'')",
        "import msgspec\nd = msgspec.json.Decoder(int)",
        "from json import loads\nloads('')",
        "import yaml\nyaml.safe_load('')",
        "answer.json()",
        "(await request.json())",
    ],
)
def test_a_parser_is_noticed(source: str) -> None:
    assert len(list(parsers_called(source))) == 1
