"""Gang scheduling: all pods of a job are placed, pinned and ungated together, or none of them is.

kube-scheduler still binds every pod. These modules decide; `claim.cluster.gang_controller` reads and
writes. Read them in this order:

- `spec`: what the pods of a gang declare, the pods and their owners (Job, MPIJob) as values, and the
  operator's settings;
- `snapshot`: the GangPlan object, the taint that reserves a node (called a tray) for a gang, and everything
  that a decision about one gang is based on; `crd` is the schema of a GangPlan;
- `reconcile`: the phases of a gang, their order, and the conditions that state the result;
- `slots`: members still to come, which pod takes which slot, and which slots are released;
- `demand`: what the members claim, and how many GPUs that is;
- `placement`: the request to the search (`core.place.gang_planner`), its result, and
  how many spare trays a namespace may keep. Which trays are spares: `core.place.search.tray_assignment`
  (`trays_that_carry`, `in_spare_order`, `spare_trays`);
- `terms`: where the pods may run; `trays`: the cluster as the placement search takes it; it chooses nothing.
"""
