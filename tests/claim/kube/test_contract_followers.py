"""An API server's contract with Rackloom: informers and leaders."""

import asyncio
import random
import time

from tests.claim.kube.world import WIDGET, Play, World, eventually

from rackloom.claim.kube.informer import Informer
from rackloom.claim.kube.leader import LeaderElection, LeaseTimings
from rackloom.core.cluster import objects
from rackloom.core.cluster.objects import index_by_uid


def test_an_informer_follows(play: Play) -> None:
    async def scenario(world: World) -> None:
        informer = Informer(
            world.api, WIDGET, world.namespace, indexers={"uid": index_by_uid}, rng=random.Random(0)
        )
        following = asyncio.create_task(informer.run())
        await informer.synced()
        made = await world.api.create(WIDGET, world.named("a"))

        async def is_seen() -> bool:
            return informer.cache.find("uid", made["metadata"]["uid"]) == (made,)

        await eventually(is_seen)
        await world.api.delete(WIDGET, "a", world.namespace)

        async def is_gone() -> bool:
            return not len(informer.cache)

        await eventually(is_gone)
        following.cancel()
        await asyncio.wait({following})

    play(scenario)


def test_an_election_has_one_winner_at_a_time(play: Play) -> None:
    async def scenario(world: World) -> None:
        # The leader lets go at its end. Before that, no pause of a busy machine may cost it the lease.
        terms, won = LeaseTimings(lease=90.0, renew=60.0, retry=0.2), []

        def candidate(name: str) -> asyncio.Task[None]:
            async def lead() -> None:
                won.append(name)
                await asyncio.Event().wait()

            api, rng = world.client(name), random.Random(name)
            election = LeaderElection(api, world.namespace, "x", name, wall=time.time, rng=rng, terms=terms)
            return asyncio.create_task(election.run(lead))

        first = candidate("one")
        await eventually(lambda: _are(won, "one"))
        second = candidate("two")
        await asyncio.sleep(1)
        assert won == ["one"]
        first.cancel()
        await asyncio.wait({first})
        await eventually(lambda: _are(won, "one", "two"))
        second.cancel()
        await asyncio.wait({second})
        lease = await world.api.get(objects.LEASE, "x", world.namespace)
        assert lease["spec"]["holderIdentity"] == ""

    play(scenario)


async def _are(found: list[str], *wanted: str) -> bool:
    return found == list(wanted)
