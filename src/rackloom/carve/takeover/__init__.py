"""Takeover from NICo: reading its REST, reading our site, and the steps of an import and of its rollback.

`nico_rest` reads a running NICo. `site_reading` reads our records and the newest observations for the plan
that `core.takeover` makes. `steps` does and undoes each step of a plan in one transaction.
"""
