"""Everything that decides, and nothing that acts: values in, values out.

A module here imports `topology`, `errors` and other modules of core only; import-linter refuses I/O, clocks,
randomness and web frameworks. So the service, the simulations, what-if questions and the tests run the same
code.

- `partitions`: intent and observation of one NVLink domain -> operations, and an independent check of them.
- `allocate`: resource.k8s.io objects, CEL, the allocator, explanations, templates, lint. Usable alone.
- `place`: whole jobs onto cliques and trays, refusals with a fix, renderers for other schedulers.
- `domains`: ComputeDomains: their objects, membership, conditions, and opaque device configurations.
- `gangs`: the phases of a gang, from its first pod to its last.
- `nics`: which network interfaces a pod gets, and how they are configured.
- `transfer`: what is measured of KV-cache transfers, and what the measurements prove.
- `diagnosis`: a snapshot of all layers -> findings, causes and fixes.
- `fair_queueing`: which of several organisations is served next.
- `refusal_log`: which refused requests get an entry in a log.
- `kubernetes`: the vocabulary that these share: objects, kinds, times, and writes as values.
"""
