"""Takeover of a site that NVIDIA Infra Controller (NICo) has run: two readings in, an ordered plan out.

`records` defines the values: what NICo answers, what our site has, the steps of a plan. `machines` finds the
machines of NICo at our site. `planner` decides which records are created under which ids, which partitions
are adopted by proof, and what is left alone.
`rollback` says what stands in the way of undoing a plan.
"""
