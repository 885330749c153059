"""The only reader of Kubernetes objects: facts of pods, nodes, claims and owners, and trays from them.

- `objects`: kinds, times and writes as values. `metadata`: the facts that any object has. `names`: the names
  of drivers and schedulers.
- `pods`: the one declaration of a pod, and its owner. `scheduling`: what a pod asks of its node.
- `nodes`: open or closed and why, GPUs by each way to get them, the clique.
- `domain_objects`: ComputeDomains, cliques, IMEX daemons, claims of channels. `device_configs`: configs of
  drivers in claims.
- `workload_kinds` and `jobs`: the pods that an object of any kind will have, and which belong together.
- `state`: one reading of a cluster, with each object that cannot be read. `trays`: from it the site.

Decisions never call the API server. They receive objects as plain JSON and return writes; `claim.kube`
and `claim.cluster` read the objects and send the writes.
"""
