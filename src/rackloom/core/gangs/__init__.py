"""Gang scheduling: all pods of a job are placed, pinned and ungated together, or none of them is.

kube-scheduler still binds every pod. These modules decide; `claim.cluster.gang_controller` reads and
writes. Read them in this order:

- `spec`: what the pods of a gang declare in labels and annotations, and the operator's settings;
- `members`: pods and their owner workloads (Job, MPIJob) as values;
- `record`: the GangPlan object, and the taint that reserves a node (called a tray) for a gang;
- `snapshot`: everything that a decision about one gang is based on;
- `reconcile`: the phases of a gang, and their order; `conditions` states the result;
- `slots`: members still to come, which pod takes which slot, and which slots are released;
- `demand`: what the members of a gang claim, by kind; `terms`: where their pods may run;
- `trays`: the cluster as the placement search takes it; it chooses nothing;
- `placement`: the request to the search (`core.place.gang_planner`), its result, and how many spare trays a
  namespace may keep. Which trays are spares: `core.place.search.tray_assignment.spare_trays`.
"""
