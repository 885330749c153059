"""The reconciler: makes the fabric match the records, and records its observations.

`loop` wakes one worker per domain. `domain_pass` is one pass (observe, plan, check, execute, observe).
`records` are the transactions of a pass. `leases` decide which replica may act on a domain.
"""
