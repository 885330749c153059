"""The demonstration, `rackloom demo`: carve, claim and prove as one sequence of verified steps.

`story` runs and reports steps, `run` holds their order, `tenants` carves two racks over REST, and `job`
runs a whole-rack job on them and breaks a GPU below it. A step is verified only by its observations.
"""
