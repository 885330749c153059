"""Placement: whole jobs onto NVLink cliques, and instances onto trays.

- `placement_values`: gang and plan as values. The site comes from `core.cluster`.
- A job on a site: `gang_requests` (job to gang), `claim_capacity` (the claims that a tray can serve),
  `node_resources` (how many members it carries by CPU and memory), `mobility` (where running jobs may go),
  `kueue_topology` (what a job asks of Kueue).
- Planning: `gang_planner` (one gang, with `search`), `gang_fixes` (why it does not fit, and what would help),
  `batch` (several gangs), `job_moves` (drain, defragment, replace a tray), `site_planner`
  (several jobs on a site: what `rackloom place` answers).
- Results: `plan_notes` (warnings), `pod_templates` and `rendering` (manifests for other schedulers),
  `slurm_topology` (the blocks of Slurm, once and kept up to date).
- `instance_trays`: the trays of a tenant's instances, for the site service.
- `promises`: for whom a tray is kept and until when, and how many machines a tenant may use.
"""
