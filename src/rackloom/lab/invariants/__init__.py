"""The promises of the design, checked after every simulated step against ground truth.

- `fabric`: S1, S2 and S4 on what a fabric was and is, for random runs and for scenarios.
- `ledger`: the answers that tenants got; an acknowledged object must exist (S10).
- `service`: S1 to S6, S9 and L5 on fabrics and REST answers, and L1, L2 and S7 once the site has
  settled.
- `memory`: S8 on IMEX channels, the identity of IMEX members, and no pod that waits for a kubelet
  resync.
- `leftovers`: nothing of a ComputeDomain is left behind.
"""
