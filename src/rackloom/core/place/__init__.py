"""Placement: whole jobs onto NVLink cliques, and instances onto trays.

- Gang, site and plan are values of `core.cluster.trays`.
- A job on a site: `gang_requests` (job to gang), `claim_capacity` (the claims that a tray can serve),
  `mobility` (where running jobs may go), `kueue_topology` (the topology that a job requests of Kueue).
- Planning: `gang_planner` (one gang, with `search`, and CPU and memory of nodes), `gang_fixes` (why a gang
  does not fit, and changes that help), `batch` (several gangs), `job_moves` (drain, defragment, replace a
  tray), `site_planner` (several jobs on a site: the answers of `rackloom place`).
- Results: `plan_notes` (warnings), `pod_templates` and `rendering` (manifests for other schedulers),
  `slurm_topology` (the blocks of Slurm, once and kept up to date).
- `instance_trays`: the trays of a tenant's instances, for the site service: reservations of trays with their
  owner and end, and how many machines a tenant may use.
"""
