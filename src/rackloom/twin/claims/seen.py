"""What the containers of jobs see, as it is: the ground truth against which S8 is judged."""

from collections.abc import Iterator
from contextlib import contextmanager

from rackloom.claim.kube.api import Object
from rackloom.twin.claims.tray import Tray

JOB_LABEL = "job"
"""On pods of jobs: whose memory they may share."""


class Seen:
    """The channels of all running containers. `broken` says what must never have been."""

    def __init__(self) -> None:
        self._held: dict[tuple[str, str], dict[str, str]] = {}
        """(where memory is shared, channel) -> pod UID -> job."""
        self.broken: list[str] = []
        self.judged = 0

    @contextmanager
    def job(self, tray: Tray, pod: Object, channels: tuple[str, ...]) -> Iterator[None]:
        """A pod's containers run with these channels while the context is entered."""
        uid, job = pod["metadata"]["uid"], pod["metadata"]["labels"][JOB_LABEL]
        if not channels:
            self.broken.append(f"{pod['metadata']['name']} runs on {tray.name} without a channel")
        for channel in channels:
            self._enter((_scope(tray, channel), channel), uid, job)
        try:
            yield
        finally:
            for channel in channels:
                del self._held[_scope(tray, channel), channel][uid]

    def _enter(self, key: tuple[str, str], uid: str, job: str) -> None:
        users = self._held.setdefault(key, {})
        users[uid] = job
        self.judged += 1
        if len(jobs := set(users.values())) > 1:
            self.broken.append(f"S8: jobs {', '.join(sorted(jobs))} share {key[1]} of {key[0]}")


def _scope(tray: Tray, channel: str) -> str:
    """Channel 0 is of the one IMEX domain that its node is in; the others are of the whole clique."""
    return tray.name if channel.endswith("/channel0") else tray.clique
