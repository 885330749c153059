"""The Kubernetes controllers for ComputeDomains and gangs, the admission webhook, and the uninstaller.

The decisions are pure functions in `core.domains` and `core.gangs`. This package reads the cluster,
carries out the decisions, and reports them in status, events and metrics.

`controller_runtime` is the loop of every controller: work queue, pending writes, executor. `gang_placer` runs
the placement search for `gang_controller`. `domain_caches` has the objects that `domain_controller` follows.
`slurm_controller` keeps Slurm's blocks up to date, in a separate process.
"""
