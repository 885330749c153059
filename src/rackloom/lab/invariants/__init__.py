"""The promises of the design, checked after every simulated step against ground truth.

- `fabric`: S1, S2 and S4 on snapshots of a fabric, for random runs and for scenarios.
- `acknowledged`: an acknowledged object must exist (S10).

The invariants of random runs and of ComputeDomain stories are in `tests/simulation`.
"""
