"""The reconciler: makes the fabric what the records want, and records what it observed.

`loop` wakes one worker per domain; `domain_pass` is one pass (observe, plan, check, execute, observe);
`records` are the transactions of a pass; `leases` decide which replica may act on a domain.
"""
