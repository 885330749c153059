"""The generated table of listeners has every limit of `serving.limits`, and no listener is missing there."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import msgspec
from docs.site.build import REFERENCES
from docs.site.reference import listeners

from rackloom.serving.limits import LISTENERS, ConnectionLimits, ProbeLimits

ROOT = Path(__file__).parents[2]
SOURCES = ROOT / "src" / "rackloom"
PAGE = ROOT / "docs" / "operating.md"


def test_the_page_lists_every_listener_with_its_limits() -> None:
    rows = [line for line in listeners.page().splitlines() if line.startswith("| `")]
    assert len(rows) == len(LISTENERS)
    for listener, row in zip(LISTENERS, rows, strict=True):
        limits = listener.limits
        who = f"{listener.reachable} | {listener.requires}"
        connections = f"{limits.connections}, {limits.connections_of_an_address}"
        start = f"| `{listener.process}` | {listener.name} | {who} | {connections} | "
        assert row.startswith(start)
        assert numbers(row.removeprefix(start)) == numbers_of(limits)


def numbers(words: str) -> list[str]:
    return sorted(re.findall(r"\d+", words))


def numbers_of(limits: ConnectionLimits) -> list[str]:
    """Every limit of one connection, in the unit of the page."""
    units = {"head_bytes": 1 << 10, "metadata_bytes": 1 << 10, "message_bytes": 1 << 20}
    values = msgspec.structs.asdict(limits)
    if isinstance(limits, ProbeLimits):
        del values["handshake_seconds"]  # its clients use no TLS
    return sorted(
        f"{value / units.get(name, 1):g}"
        for name, value in values.items()
        if not name.startswith("connections") and value is not None
    )


def test_the_page_of_the_site_says_how_to_print_them() -> None:
    assert "`python -m docs.site.reference listeners`" in PAGE.read_text()
    assert REFERENCES["listeners"] is listeners.page


OPENERS = {
    "create_server", "start_server", "create_unix_server", "start_unix_server", "bound_socket", "listen",
    "add_insecure_port", "add_secure_port", "serve_http", "HTTPServer", "ThreadingHTTPServer",
}  # fmt: skip
SHARED = {"serving/acceptor.py", "serving/grpc_server.py"}
"""They accept connections under their callers' limits."""
SIMULATED = {
    "lab/imex/service.py": "a simulated nvidia-imex, in the network of its node",
}
NO_LISTENERS = {
    "prove/transfer/fallback.py": "a connection of a process to itself",
    "carve/store/database.py": "an event of SQLAlchemy",
    "lab/nodes/trays.py": "an event of NVML",
    "claim/node/gpu/plugin.py": "an event of NVML",
    "lab/virtual/service.py": "a change of the records",
}


def opened(text: str) -> Iterator[str]:
    if not any(f"{name}(" in text for name in OPENERS):
        return  # parsing every module would take seconds
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Call):
            name = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
            if name in OPENERS:
                yield name


def test_no_source_file_opens_a_listener_that_is_not_listed() -> None:
    users = {
        str(path.relative_to(SOURCES))
        for path in SOURCES.rglob("*.py")
        if not path.name.endswith("_pb2_grpc.py") and set(opened(path.read_text())) - {"serve_http"}
    }
    known = {listener.opener for listener in LISTENERS} | SHARED | SIMULATED.keys() | NO_LISTENERS.keys()
    assert users == known


def test_whoever_serves_http_names_its_limits() -> None:
    calls = [
        ast.unparse(node)
        for text in map(Path.read_text, SOURCES.rglob("*.py"))
        if "serve_http(" in text
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.Call) and getattr(node.func, "id", "") == "serve_http"
    ]
    assert len(calls) >= 6
    assert [call for call in calls if not re.search(r"limits=[A-Z]", call)] == []
