"""UCX is steered by its environment and says in its log what it chose; both are read and written here.

Facts this rests on: NIXL's own device list spoils TCP device names (it appends a port), so devices are pinned
through UCX_NET_DEVICES. NIXL asks for two RMA rails unless told otherwise, and UCX then splits one transfer
over two devices silently. UCX_PROTO_INFO prints a table per operation and peer: first for the loopback
connection ("self"), then for the real one.
"""

import re
from pathlib import Path

from rackloom.prove.transfer.values import Op, Ucx

_CALL = {"WRITE": "ucp_put", "READ": "ucp_get"}
_TITLE = re.compile(r"\| \S+ (?P<scope>self|intra-node|inter-node) cfg#")
_ROW = re.compile(r"\|\s*(?P<range>\d\S*)\s*\|(?P<description>[^|]*)\|(?P<config>[^|]*)\|\s*$")
_LANE = re.compile(r"\b([a-z]\w*/[\w.:-]+)")
_COMPLAINT = re.compile(r"\b(?:ERROR|WARN)\s+(.*)$", re.MULTILINE)
_RAILS = 2
"""NIXL's own limit; with one device pinned, one."""


def environment(ucx: Ucx, log: Path) -> dict[str, str]:
    """The variables that pin UCX as asked and make it write down what it does into `log`."""
    variables = {
        "UCX_PROTO_INFO": "y",
        "UCX_LOG_FILE": str(log),
        "UCX_MAX_RMA_RAILS": str(min(_RAILS, max(1, len(ucx.net_devices)))),
        "NIXL_LOG_LEVEL": "WARN",
    }
    if ucx.transports:
        variables["UCX_TLS"] = ",".join(ucx.transports)
    if ucx.net_devices:
        variables["UCX_NET_DEVICES"] = ",".join(ucx.net_devices)
    return variables


def protocols(log: str, op: Op) -> tuple[str, ...]:
    """Transport and device of each lane that UCX uses for `op` towards the peer, such as tcp/rdma0.

    Empty when the log holds no table for that operation.
    """
    lanes: dict[str, None] = {}
    scope, wanted = "self", False
    for line in log.splitlines():
        if title := _TITLE.search(line):
            scope, wanted = title["scope"], False
        elif "remote memory" in line:
            wanted = scope != "self" and _CALL[op] in line
        elif wanted and (row := _ROW.search(line)):
            lanes |= dict.fromkeys(_LANE.findall(row["config"]))
    return tuple(lanes)


def complaint(log: str) -> str | None:
    """The last warning or error of UCX, which NIXL's own error codes leave out."""
    found = _COMPLAINT.findall(log)
    return found[-1].strip() if found else None
