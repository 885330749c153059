"""Admission of Kueue's workloads by a plan: each gets room for GPUs, NICs and channels together, or waits.

These modules decide. `core.cluster.kueue_objects` reads Workloads, and `claim.cluster.kueue_controller` lists
and writes them.

- `plans`: the plan that a Ready check records, and the room that it holds.
- `checks`: verdicts on the workloads that wait for a check, one after the other, on one reading of the
  cluster.
"""
