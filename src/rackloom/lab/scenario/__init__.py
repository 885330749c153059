"""Incidents as files: the actions on a simulated site, its faults, and the expected observations.

`reading` turns a TOML file into steps and checks them, `playing` plays them on a `stage`. A step is one
function (`model`), and its parameters have the types of `parameters`. The steps by subject:

- `tenants`, `site_faults`, `switch_leaders`, `site_expectations`: the site service and its switches.
- `cluster_actions`, `control_plane`, `cluster_expectations`: the Kubernetes cluster.
- `every_layer`: repair, and the promises that hold at any time.
"""
