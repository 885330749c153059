"""Placement: whole jobs onto NVLink cliques, and instances onto trays.

- `placement_values`: the values (site, gang, plan) and the label names of schedulers.
- Reading Kubernetes objects: `object_shapes` (validation), `pod_constraints` (pods and node rules),
  `workload_kinds` and `jobs`, `gang_requests` (job to gang), `observed_site` (nodes, pods and slices to
  site), `claim_capacity` (what claims a tray can serve),
  `node_resources` (how many members it carries by CPU and memory), `mobility` (where running jobs may go),
  `kueue_topology` (what a job asks of Kueue).
- Planning: `gang_planner` (one gang, with `search`), `gang_fixes` (why it does not fit, and what would help),
  `batch` and `packing` (several gangs), `job_moves` (drain, defragment, replace a tray), `site_planner`
  (several jobs on a site: what `rackloom place` answers).
- Results: `plan_notes` (warnings), `pod_templates` and `rendering` (manifests for other schedulers),
  `slurm_topology` (the blocks of Slurm, once and kept up to date).
- `instance_trays`: the trays of a tenant's instances, for the site service.
- `reservations`: for whom a tray is kept, and until when. `allocations`: how many machines a tenant may use.
"""
