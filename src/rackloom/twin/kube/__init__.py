"""A Kubernetes API server in this process, for simulations and tests.

`FakeKube` keeps the objects; what speaks to it holds one of its two fronts:

    kube = FakeKube(namespaces=("default", "kube-system", "rackloom-system"), seed=7)
    api = DirectApi(kube, "controller")     # a KubeApi; the name is its user and its field manager
    transport = KubeTransport(kube, "kubectl")      # an httpx2 transport: a real client runs against it

What can be set or read on the way:

- `kube.serve(kind, Shape(...))`: a resource type besides those of `claim.kube.kinds`, or another shape.
- `kube.rules[kind].append(rule)`: `rule(new, old) -> object` fills in defaults, or raises `Rejected`.
- `kube.admission.append(hook)`: `await hook(Review) -> object | None`, which is where a webhook runs.
- `kube.faults.delay(...)`, `kube.faults.add(Fault(...))`: declared latencies, and errors drawn from the seed.
- `kube.lag.begin(...)`: watches of some users are silent, and lists from memory old;
  `kube.tangle.begin(...)`: they hear changes twice or out of order. Like `kube.faults`, both count in `hits`
  whom they struck.
- `kube.calls`: how often which user sent which verb for which resource; `kube.writes(user)`.
- `kube.store.compact()` makes old resourceVersions answer 410, `kube.store.hang_up()` ends every watch.

Time is the running loop's: under `twin.virtual.event_loop` it is virtual. Garbage of ownerReferences is
collected in a later turn of the loop. Pods of DaemonSets, scheduling and a
kubelet are not the server's business: `twin.kube.controllers` has small ones.
"""

from rackloom.twin.kube.direct import DirectApi, ReadingApi
from rackloom.twin.kube.faults import Fault
from rackloom.twin.kube.server import FakeKube, Review
from rackloom.twin.kube.shapes import Shape
from rackloom.twin.kube.transport import KubeTransport

__all__ = ["DirectApi", "FakeKube", "Fault", "KubeTransport", "ReadingApi", "Review", "Shape"]
