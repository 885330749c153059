"""A simulated site for other people's tests: racks, switch controllers, DRA drivers, ComputeDomains, faults.

`start_site` runs the same as `rackloom up`, in a child process or in a thread of this one, and gives a
`Site`: REST address, tokens, kubeconfig, faults to inject and clear, and expectations to wait for.
`start_site_async` gives the same for asyncio. docs/twin.md has examples. The pytest plugin is
`rackloom.pytest_plugin`.

    with start_site(racks=1, seed="7") as site:
        site.inject("gpu-lost", gpu="rack-01/slot-2/gpu-0")
        site.expect("devices", driver="gpu.nvidia.com", tray="rack-01/slot-2", count=1, tainted=True)
        site.clear()

The whole state of a site is in its home. It has a temporary home and ports that the kernel chose, and ends
with its context, also after an exception or when the process that started it is killed.

Importing this module imports nothing of a site.
"""

from rackloom.testing.failures import SiteFailed, StepNotObserved, TimedOut
from rackloom.testing.sites import AsyncSite, Site, start_site, start_site_async

__all__ = [
    "AsyncSite",
    "Site",
    "SiteFailed",
    "StepNotObserved",
    "TimedOut",
    "start_site",
    "start_site_async",
]
