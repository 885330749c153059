"""Takeover of a site that NVIDIA Infra Controller (NICo) has run: two readings in, an ordered plan out.

`records` defines the values: the readings of NICo and of our site, and the steps of a plan. `machines` finds
the machines of NICo at our site. `planner` decides which records are created under which ids and which
partitions are adopted by proof, and leaves the rest alone. `rollback` lists the obstacles to undoing a plan.
"""
