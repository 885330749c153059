"""Who makes the members of a gang, as far as it is known how many are still to come."""

from bisect import bisect_right
from collections.abc import Iterable, Mapping
from operator import attrgetter

import msgspec

from rackloom.claim.cluster.gang.members import Member
from rackloom.claim.kube.api import Kind

MPI_JOB = Kind("kubeflow.org", "v2beta1", "MPIJob", "mpijobs", namespaced=True)
LONGEST_PAUSE = 600.0
"""Seconds that a Job lets pass, at most, before it makes a pod anew that failed.

Source: kube-controller-manager, `MaxJobPodFailureBackOff`; it begins with 10 s and doubles, and is no option.
"""


class Maker(msgspec.Struct, frozen=True, kw_only=True):
    """A Job. It replaces pods that failed or were deleted, until `completions` pods have succeeded.

    Source: Kubernetes, "Jobs", sections "Parallel execution for Jobs" and "Completion mode".
    """

    completions: int
    parallelism: int
    """So many pods at a time."""
    is_indexed: bool
    """Each index below `completions` succeeds once; a job that was cut down has pods above it."""
    succeeded: int = 0
    """Pods that the Job has counted, also where they are gone by now; it counts late, never too many."""
    closed: tuple[range, ...] = ()
    """Indexes that succeeded, or failed so often that the Job makes them not again; in order, each once.

    A Job of two thousand million completions says that they are over in a few letters.
    """
    is_suspended: bool = False
    """It makes no pods now, and makes them when it goes on."""
    is_ending: bool = False
    """It makes no pods any more: it is over, is about to be, or is being deleted."""
    is_owned: bool = False
    """Its controller (JobSet) may make it anew, with all of its pods, when another one of the set fails."""
    created: str = ""
    """RFC 3339, in whole seconds of UTC; so is the next."""
    over_since: str | None = None
    """When it ended, to stay so; None while it makes pods, and where it may be made anew."""

    @property
    def is_still(self) -> bool:
        """It makes no pods now."""
        return self.is_suspended or self.is_ending

    @property
    def at_once(self) -> int:
        """So many pods it has at first."""
        return min(self.completions, self.parallelism)

    def makes_all_of(self, size: int) -> bool:
        """Whether a gang of this size may be all its own: a smaller Job has others beside it."""
        return self.at_once >= size

    def over(self, members: Iterable[Member]) -> int:
        """How many of its completions ask for no pod any more; `members` are its pods."""
        done = [one for one in members if one.is_done]
        if not self.is_indexed:
            return max(self.succeeded, len(done))
        told = sum(len(range(one.start, min(one.stop, self.completions))) for one in self.closed)
        return told + sum(
            index < self.completions for index in {one.rank[0] for one in done} if not self._has(index)
        )

    def _has(self, index: int) -> bool:
        """Whether the Job has closed an index."""
        before = bisect_right(self.closed, index, key=attrgetter("start"))
        return before > 0 and index in self.closed[before - 1]


class Finished(msgspec.Struct, frozen=True, kw_only=True):
    """An MPIJob that makes no pod any more, nor does its launcher's Job."""

    uid: str
    seats: Mapping[tuple[str, str], int] = msgspec.field(default_factory=dict)
    """Its replicas, by gang and group of the gang."""

    def makes_all_of(self, gang: str, sizes: Mapping[str, int]) -> bool:
        """Whether nobody else makes pods of a gang with groups of these sizes."""
        return all(self.seats.get((gang, group), 0) >= size for group, size in sizes.items())


Makers = Mapping[str, Maker | Finished]
"""By UID of the pods' owner."""
