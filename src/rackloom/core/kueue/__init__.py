"""Admission of Kueue's workloads by a plan: each gets room for GPUs, NICs and channels together, or waits.

These modules decide; `claim.cluster.kueue_controller` reads and writes.

- `workloads`: a Workload as a value, the state of a check on it, and the plan that a Ready check records;
- `checks`: what becomes of the workloads that wait for a check, one after the other, on one reading of the
  cluster.
"""
