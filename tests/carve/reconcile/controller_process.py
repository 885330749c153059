"""`python -m tests.carve.reconcile.controller_process HOST`: a simulated controller in a separate process.

It prints its port, and serves the rack of `served_rack` until it is killed.
"""

import asyncio
import sys

from tests.carve.reconcile.served_rack import make_fabric

from rackloom.lab.switches import servers


async def serve(host: str) -> None:
    servers.LOOPBACK = host
    async with servers.NmxcServer(make_fabric()) as server:
        print(server.url, flush=True)  # noqa: T201
        await asyncio.Event().wait()


if __name__ == "__main__":
    asyncio.run(serve(sys.argv[1]))
