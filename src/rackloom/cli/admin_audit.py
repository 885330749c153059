"""`rackloom admin audit export`: the audit log as JSON lines, oldest entries first.

The entries are read in pages, so neither the site nor this command holds more than one page. To continue
after an interruption, pass the id of the last line as `--after`. `--follow` waits for new entries.
"""

import sys
import time
from datetime import datetime
from typing import Annotated

from cyclopts import App, Parameter

from rackloom.carve.admin import operator_pb2 as ours
from rackloom.cli.admin import DEFAULT_CONNECTION, ConnectionParameters, RpcCaller, connect, timestamp
from rackloom.cli.common import with_common_flags

FOLLOW_SECONDS = 1.0

app = App(name="audit", help="Requests of all users, with their results.")


@app.command(name="export")
@with_common_flags
def export(
    *,
    since: Annotated[
        datetime | None, Parameter(help="Only entries from then on; UTC without a zone.")
    ] = None,
    until: Annotated[datetime | None, Parameter(help="Only entries before then; UTC without a zone.")] = None,
    after: Annotated[int, Parameter(help="Only entries after the one with this id.")] = 0,
    follow: Annotated[bool, Parameter(negative="", help="Wait for new entries.")] = False,
    at: ConnectionParameters = DEFAULT_CONNECTION,
) -> None:
    """Write the audit log to stdout: one JSON object a line, oldest first."""
    request = ours.AuditExportRequest(after=after, since=timestamp(since), until=timestamp(until))
    with connect(at) as call_rpc:
        _write_all(call_rpc, request)
        while follow:
            time.sleep(FOLLOW_SECONDS)
            _write_all(call_rpc, request)


def _write_all(call_rpc: RpcCaller, request: ours.AuditExportRequest) -> None:
    """Write the entries after `request.after`, and set it to the id of the last one."""
    while (reply := call_rpc("ExportAuditEntries", request)).last:
        sys.stdout.write("".join(f"{entry.decode()}\n" for entry in reply.entries))
        sys.stdout.flush()
        request.after = reply.last
