"""The beginnings and ends of stories about gangs, and the conditions that many of them wait for."""

import asyncio
from contextlib import suppress

from tests.claim.cluster.gangs.gang_site import GangSite

from rackloom.lab.kube.controllers.claims import ResourceClaimController

NIC = "dra.net"


async def opened(racks, trays, **how):
    """A site of racks whose trays are there, without a controller."""
    site = GangSite(racks, trays, **how)
    await site.begin()
    return site


async def claiming_site(racks, trays, without=(), **how):
    """With the programs that make and allocate claims, and NICs on all trays but those `without`."""
    site = await opened(racks=racks, trays=trays, **how)
    site.tasks.append(asyncio.create_task(ResourceClaimController(site.kube, site.rng).run()))
    site.tasks.append(asyncio.create_task(site.gatekeeper().run()))
    await site.publish(NIC, without)
    return site


async def at_work(racks, trays, **how):
    """A site with a controller."""
    site = await opened(racks, trays, **how)
    site.start()
    return site


async def bound_job(site, name, sizes, **how):
    """A job after all its pods got their trays."""
    job = site.job(name, sizes, **how)
    await site.until(lambda: site.is_bound(name, sum(sizes.values())))
    return job


async def over(site, *jobs):
    """The jobs end, and nothing is left of their gangs."""
    for job in jobs:
        await job.end()
    await site.until(site.is_clean)
    await site.end()


def watch_bindings(site):
    """The nodes that each seat was bound to, in order."""
    found, honest = {}, site.kube.bind

    def noted(key, node, uid, **asked):
        pod = honest(key, node, uid, **asked)
        found.setdefault(key[1], []).append(node)
        return pod

    site.kube.bind = noted
    return found


async def until_dead_and_again(site, last):
    """Start a controller that dies after its write number `last`, if it gets that far, then another."""
    site.start(last)
    with suppress(TimeoutError):
        async with asyncio.timeout(90):
            await site.api.dead.wait()
    await site.kill()
    await asyncio.sleep(0.2)
    site.start()


def holds(site, trays):
    """Whether just these trays are reserved, for `until`."""

    async def look():
        return set(await site.taints()) == set(trays)

    return look


def has_left(site, name, count, tray):
    """Whether all pods of a job have a tray, and none has this one, for `until`."""

    async def look():
        nodes = (await site.places(name)).values()
        return len(nodes) == count and all(nodes) and tray not in nodes

    return look
