"""The only reader of Kubernetes objects: facts of pods, nodes, claims and owners, and trays from them.

- `objects`: kinds, times, the facts that any object has, and writes as values. `names`: the names of drivers
  and schedulers.
- `pods`: the one declaration of a pod, and its owner. `scheduling`: the node requirements of a pod.
- `nodes`: open or closed and why, GPUs by each way to get them, the clique.
- `domain_objects`: ComputeDomains, cliques, IMEX daemons, claims of channels. `device_configs`: configs of
  drivers in claims.
- `workload_kinds` and `jobs`: the pods that an object of any kind will have, and the pods that belong
  together.
- `state`: one reading of a cluster, with each object that cannot be read. `reader` makes it, and follows a
  cluster. `trays`: the site made from it.
- `gang_objects`, `gang_owners`, `kueue_objects`: gangs and their Jobs, Workloads of Kueue.
- `devices`: the published devices. `projection`: the fields that a cache keeps.

Decisions never call the API server. They take values of this package (`PodObject` and `NodeObject` for pods
and nodes), or objects of other kinds as handles, and return writes. `claim.kube` and `claim.cluster` receive
the objects and send the writes.
"""
