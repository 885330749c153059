"""NVLink partitions of one domain: intent and observation in, a checked plan of operations out.

`domain` defines the values, `partition_layout` derives who wants and who holds which GPU, `planner` plans
the next operations, and `safety` checks a plan independently of the planner before it is executed.
`reading_age` says how long an observation counts.
"""
