"""The table of listeners in docs/operating.md is that of `serving.limits`, and none is missing there."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

from rackloom.serving.limits import LISTENERS, ConnectionLimits, GrpcLimits, HttpLimits, ProbeLimits

ROOT = Path(__file__).parents[2]
SOURCES = ROOT / "src" / "rackloom"
PAGE = ROOT / "docs" / "operating.md"
HEAD = "| process | listener | reached by; requires | connections, of an address | limits of each |"


def table() -> list[str]:
    """As it should be."""
    return [
        f"| `{listener.process}` | {listener.name} | {listener.reachable}; {listener.requires}"
        f" | {listener.limits.connections}, {listener.limits.connections_of_an_address}"
        f" | {limits_in_words(listener.limits)} |"
        for listener in LISTENERS
    ]


def limits_in_words(limits: ConnectionLimits) -> str:
    if isinstance(limits, HttpLimits):
        head = (
            f"head {limits.head_bytes >> 10} KiB, {limits.head_fields} fields and {limits.head_seconds:g} s"
        )
        answer = "no limit" if limits.answer_seconds is None else f"{limits.answer_seconds:g} s"
        return (
            f"handshake {limits.handshake_seconds:g} s, {head}, body {limits.body_seconds:g} s,"
            f" answer {answer}, unread {limits.unread_seconds:g} s, idle {limits.idle_seconds} s"
        )
    if isinstance(limits, GrpcLimits):
        idle = "" if limits.idle_seconds is None else f", idle {limits.idle_seconds:g} s"
        age = "" if limits.age_seconds is None else f", age {limits.age_seconds:g} s"
        return (
            f"handshake {limits.handshake_seconds:g} s, metadata {limits.metadata_bytes >> 10} KiB,"
            f" message {limits.message_bytes >> 20} MiB, {limits.streams} calls at a time"
            f"{idle}{age}"
        )
    if isinstance(limits, ProbeLimits):
        head = f"head {limits.head_bytes >> 10} KiB and {limits.head_seconds:g} s"
        return f"{head}, unread {limits.unread_seconds:g} s"
    return f"handshake {limits.handshake_seconds:g} s"


def test_the_page_lists_every_listener_with_its_limits() -> None:
    lines = PAGE.read_text().splitlines()
    first = lines.index(HEAD) + 2
    assert lines[first : first + len(LISTENERS)] == table()


OPENERS = {
    "create_server", "start_server", "create_unix_server", "start_unix_server", "bound_socket", "listen",
    "add_insecure_port", "add_secure_port", "serve_http", "HTTPServer", "ThreadingHTTPServer",
}  # fmt: skip
SHARED = {"serving/acceptor.py", "serving/grpc_server.py"}
"""They accept for whoever gives them limits."""
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
