"""A Kubernetes API server in this process, for simulations and tests.

`server.FakeKube` keeps the objects. Clients use one of its two front ends:

    kube = FakeKube(namespaces=("default", "kube-system", "rackloom-system"), seed=7)
    api = DirectApi(kube, "controller")          # a KubeApi for the user and field manager "controller"
    transport = KubeTransport(kube, "kubectl")   # an httpx2 transport, for a real client

Options and counters:

- `kube.serve(kind, TypeSchema(...))`: another resource type, or another schema of one.
- `kube.rules[kind].append(rule)`: `rule(new, old) -> object` fills in defaults or raises `Rejected`.
- `kube.admission.append(hook)`: `await hook(AdmissionReview) -> object | None`, the place of a webhook.
- `kube.faults.delay(...)`, `kube.faults.add(RequestFault(...))`: latencies and errors, drawn from the
  seed.
- `kube.stale_reads.begin(...)`, `kube.disordered_events.begin(...)`: stale reads, and events twice or
  out of order. Like `kube.faults` they count in `hits` how often they had an effect.
- `kube.calls`, `kube.writes(user)`: how often which user sent which verb for which resource.
- `kube.store.compact()` makes old resourceVersions answer 410. `kube.store.hang_up()` ends every watch.

Time is that of the running loop. Garbage collection happens in a later turn of the loop. DaemonSets,
Jobs, claims and scheduling are in `controllers`, pods on nodes in `lab.nodes`. The parts that only kubectl
needs are in `kubectl`. The contract suites run on this server and on a real kube-apiserver. If they
disagree, this one has a bug.
"""
