"""NVLink partitions of one domain: intent and observation in, a checked plan of operations out.

`domain` defines the values, and derives which partition wants and holds each GPU. `planner` plans the next
operations, and `safety` checks a plan independently of the planner before it is executed. `status_rules`
decides the claims that an observation supports, and how long it counts.
"""
