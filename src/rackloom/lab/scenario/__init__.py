"""Incidents as files: what is done to a simulated site, what breaks, and what must be observed.

`reading` turns a TOML file into steps and checks them, `playing` plays them on a stage, and the other
modules hold the steps by subject: each step type beside the code that carries it out.

- `tenants`, `site_faults`, `switch_leaders`, `site_expectations`: the site service and its switches.
- `cluster_actions`, `control_plane`, `cluster_expectations`: the Kubernetes cluster.
"""
