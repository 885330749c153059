"""One IMEX daemon of a ComputeDomain, from joining its clique to taking leave of it."""

import asyncio
from collections.abc import Awaitable, Callable
from random import Random

import structlog

from rackloom.claim.domain import names
from rackloom.claim.domain.objects import Clique, clique
from rackloom.claim.imex.control import ImexControl
from rackloom.claim.imex.member import CliqueMember, Place, peers_of
from rackloom.claim.imex.own_pod import OwnPod
from rackloom.claim.imex.reporter import Reporter
from rackloom.claim.imex.supervisor import Supervisor
from rackloom.claim.kube.api import KubeApi, KubeError
from rackloom.claim.kube.informer import Informer
from rackloom.claim.kube.kinds import COMPUTE_DOMAIN_CLIQUE
from rackloom.errors import Refused

LEAVE_SECONDS = 10.0
"""How long an orderly end may take to tell the API server; the controller removes what is left over."""
CREDENTIALS_SECONDS = 30.0
"""Between looks at the certificate on disk; kubelet refreshes a Secret about once a minute."""

_log = structlog.get_logger(__name__)


class _PodIsGoing(Exception):
    """Nobody waits for this daemon any more."""


class ImexDaemon:
    """Joins, follows the clique object, keeps the daemon running, and tells what it sees of it."""

    def __init__(
        self,
        api: KubeApi,
        place: Place,
        supervisor: Supervisor,
        control: ImexControl,
        random: Random,
        entered: Callable[[], None] = lambda: None,
    ) -> None:
        self._entered = entered
        self._api = api
        self._place = place
        self._supervisor = supervisor
        self._control = control
        self._random = random
        self._member = CliqueMember(api, place, random)
        self._pod = OwnPod(api, place)
        self._unusable: tuple[str, ...] = ()

    async def run(self) -> None:
        """Run until cancelled, or until its node was given up: its entry taken, and its pod being deleted.

        Raises `Refused` when the clique has no place left.
        """
        self._follow(await self._member.join())
        reporter = Reporter(
            self._control, self._supervisor, self._member.set_ready, self._pod.report, self._entered
        )
        endless = (self._watch, self._supervisor.run, reporter.run, self._look_at_credentials)
        try:
            async with asyncio.TaskGroup() as group:
                for work in (*endless, self._pod.tell_clique):
                    group.create_task(work())
        except* Refused as refused:
            raise _first(refused) from refused
        except* _PodIsGoing:
            _log.warning("imex.given_up", node=self._place.node)
        finally:
            await _within(LEAVE_SECONDS, self._member.leave)

    async def _watch(self) -> None:
        name = names.clique_object_name(self._place.compute_domain, self._place.clique_id)
        informer = Informer(
            self._api,
            COMPUTE_DOMAIN_CLIQUE,
            self._place.namespace,
            fields=f"metadata.name={name}",
            rng=self._random,
        )
        informer.on_change(lambda obj: self._follow(clique(obj)))
        async with asyncio.TaskGroup() as group:
            group.create_task(informer.run())
            group.create_task(self._stay_in(informer))

    async def _stay_in(self, informer: Informer) -> None:
        """Join again where somebody took the entry, or the whole object, away.

        Not so where the pod is being deleted: its node was lost, and another may have the index by now.
        """
        await informer.synced()
        while True:
            if not self._is_entered(informer):
                await self._join_again()
            await asyncio.sleep(self._random.uniform(1.0, 2.0))

    async def _join_again(self) -> None:
        try:
            is_going = await self._pod.is_going()
        except KubeError:
            return  # asked again soon
        if is_going:
            raise _PodIsGoing
        self._follow(await self._member.join())

    def _is_entered(self, informer: Informer) -> bool:
        own = None
        for obj in informer.cache:
            own = clique(obj).on(self._place.node)
        return own is not None and own.ip_address == self._place.address

    def _follow(self, value: Clique) -> None:
        self._member.saw(value)
        peers = peers_of(value, self._place.node)
        if peers.unusable != self._unusable:
            self._unusable = peers.unusable
            _log.warning("imex.members_unusable", members=peers.unusable)
        if peers.own_index is not None:
            self._supervisor.set_peers(peers)

    async def _look_at_credentials(self) -> None:
        while True:
            await asyncio.sleep(CREDENTIALS_SECONDS)
            self._supervisor.look_again()


def _first(group: BaseExceptionGroup[Refused]) -> Refused:
    """One of a group's errors: the program has one line to say why it ends."""
    one = group.exceptions[0]
    return _first(one) if isinstance(one, BaseExceptionGroup) else one


async def _within(seconds: float, work: Callable[[], Awaitable[None]]) -> None:
    try:
        async with asyncio.timeout(seconds):
            await work()
    except TimeoutError:
        pass
