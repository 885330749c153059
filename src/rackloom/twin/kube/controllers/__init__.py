"""Small stand-ins for the controllers of a cluster, so that ours can be tested end to end in one process.

Each has `run()`, which works until it is cancelled:

- `DaemonSets(kube, rng)`: one pod of a DaemonSet on every node that its template selects.
- `PodClaims(kube, rng)`: claims from templates, reservations that have ended, claims nobody uses any more.
- `Jobs(kube, rng)`: pods of a Job until enough have succeeded.
- `NodeLifecycle(kube, wall)`: nodes whose heartbeat stopped.
- `Scheduler(kube, rng)`: devices for the claims of pods (by `claim.allocate`), reservations, binding.

They read the store itself, which is never behind, and write as `kube-controller-manager` and
`kube-scheduler` through the API, where writes are counted, delayed and made to fail like anyone's. Pods on
nodes are brought to life by `twin.nodes`. Rolling updates, preemption and scoring are not simulated.
"""

from rackloom.twin.kube.controllers.daemon_sets import DaemonSets
from rackloom.twin.kube.controllers.jobs import Jobs
from rackloom.twin.kube.controllers.node_lifecycle import NodeLifecycle
from rackloom.twin.kube.controllers.pod_claims import PodClaims
from rackloom.twin.kube.controllers.scheduler import Scheduler

__all__ = ["DaemonSets", "Jobs", "NodeLifecycle", "PodClaims", "Scheduler"]
