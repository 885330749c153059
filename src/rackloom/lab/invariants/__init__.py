"""The promises of the design, checked after every simulated step against ground truth.

- `ledger`: what tenants were told; an acknowledged object must exist (S10).
- `service`: S1 to S6, S9 and L5 on fabrics and REST answers, and L1, L2 and S7 once the site has
  settled.
- `memory`: S8 on IMEX channels, the identity of IMEX members, and no pod that waits for a kubelet
  resync.

`lab.scenario.stage` checks S1, S2 and S4 for scenario files, and `lab.scenario.site_expectations` S10.
`lab.compute_domains.story` checks that nothing is left behind.
"""
