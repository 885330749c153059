"""Whether the IMEX daemon that a channel needs is READY on this node.

A clique object says what daemons wrote into it. After the node's power failed it says READY of a daemon that
has not started again, until that has. So a daemon writes the boot of its node into a file in its directory,
which lies on the host, after its first word on itself: READY counts where that file names this boot. Daemons
of NVIDIA's driver and of earlier releases write none, and count as before.
"""

import os
from collections.abc import AsyncIterator
from contextlib import suppress
from pathlib import Path

import msgspec

from rackloom import programs
from rackloom.claim.domain.names import BOOT_FILE, CLIQUE_ID_LABEL, COMPUTE_DOMAIN_LABEL, clique_object_name
from rackloom.claim.domain.objects import Readiness, clique
from rackloom.claim.kube.api import KubeApi, NotFound, Object
from rackloom.claim.kube.kinds import COMPUTE_DOMAIN_CLIQUE
from rackloom.claim.node.imex.settings import ImexSettings
from rackloom.errors import Retry

WAIT_SECONDS = 0.25
CTL_SECONDS = 10.0


class Daemons:
    """IMEX daemons of this node, as the clique objects in their namespaces tell of them."""

    def __init__(self, api: KubeApi, settings: ImexSettings) -> None:
        self._api = api
        self._settings = settings
        self._namespaces = settings.namespaces

    async def need_own(self, uid: str, clique_id: str) -> None:
        """Raise `Retry` unless the daemon of ComputeDomain `uid` is READY here."""
        name = clique_object_name(uid, clique_id)
        for namespace in self._namespaces:
            with suppress(NotFound):
                if self._is_ready(await self._api.get(COMPUTE_DOMAIN_CLIQUE, name, namespace)):
                    return
        raise _not_ready(f"ComputeDomain {uid}")

    async def need_warm(self, clique_id: str) -> None:
        """Raise `Retry` unless the daemon that is kept warm for the clique is READY here."""
        for namespace in self._namespaces:
            listed = await self._api.list(COMPUTE_DOMAIN_CLIQUE, namespace, labels=of_clique(clique_id))
            if any(self._is_ready(clique_object) for clique_object in listed.items):
                return
        raise _not_ready(f"clique {clique_id}")

    async def changes(self, labels: str) -> AsyncIterator[None]:
        """Yield when a daemon of the clique objects selected by `labels` is READY here.

        Of the namespace for new daemons alone: those of earlier installations run already, and where one
        starts again the next attempt finds it.
        """
        namespace = self._namespaces[0]
        listed = await self._api.list(COMPUTE_DOMAIN_CLIQUE, namespace, labels=labels)
        if any(self._is_ready(one) for one in listed.items):
            yield
        events = self._api.watch(
            COMPUTE_DOMAIN_CLIQUE, namespace, resource_version=listed.resource_version, labels=labels
        )
        async for event in events:
            if event.type in ("ADDED", "MODIFIED") and self._is_ready(event.object):
                yield

    def _is_ready(self, obj: Object) -> bool:
        value = clique(obj)
        here = value.on(self._settings.node)
        ready = here is not None and here.status is Readiness.READY
        return ready and self._is_of_this_boot(value.compute_domain)

    def _is_of_this_boot(self, uid: str) -> bool:
        """Whether its file names this boot, or there is none.

        The daemon's container can put anything there. A link is not followed, a pipe not waited for, and no
        more is read than an id has.
        """
        wanted = self._settings.boot_id.encode()
        if not wanted:
            return True
        path = self._settings.domains / uid / BOOT_FILE
        try:
            file = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
        except FileNotFoundError:
            return True
        except OSError:
            return False
        try:
            return os.read(file, len(wanted) + 1) == wanted
        except OSError:
            return False
        finally:
            os.close(file)


def _not_ready(whose: str) -> Retry:
    return Retry(f"the IMEX daemon of {whose} is not ready on this node", after=WAIT_SECONDS)


def of_domain(uid: str) -> str:
    """Selects the clique objects of a ComputeDomain."""
    return f"{COMPUTE_DOMAIN_LABEL}={uid}"


def of_clique(clique_id: str) -> str:
    """Selects the clique objects of a clique."""
    return f"{CLIQUE_ID_LABEL}={clique_id}"


class HostDaemon(msgspec.Struct, frozen=True, kw_only=True):
    """An nvidia-imex that the host runs by itself."""

    root: Path
    """Where the host's root, with nvidia-imex-ctl in it, is mounted."""
    socket: str = "/etc/nvidia-imex/imex_ctrl.sock"

    async def need_ready(self) -> None:
        """Raise `Retry` unless it says READY."""
        asked = ("nvidia-imex-ctl", "-q", "-u", self.socket)
        ended = await programs.run(
            *programs.below(self.root), *asked, seconds=CTL_SECONDS, again=WAIT_SECONDS
        )
        if ended.said != "READY":
            raise Retry(f"the host's nvidia-imex says {ended.said!r}, not READY", after=WAIT_SECONDS)
