"""Gang scheduling: all pods of a job are placed, pinned and ungated together, or none of them is.

kube-scheduler still binds every pod. These modules decide, and `claim.cluster.gang_controller` reads and
writes. `core.cluster.gang_objects` and `gang_owners` turn pods, nodes, Jobs and MPIJobs into values. Read
the modules in this order:

- `snapshot`: the GangPlan object, the taint that reserves a node (called a tray) for a gang, the operator's
  settings, and everything that a decision about one gang is based on. `crd` is the schema of a GangPlan.
- `reconcile`: the phases of a gang, their order, and the conditions that state the result.
- `slots`: members still to come, which pod takes which slot, and which slots are released.
- `requests`: the request to the search (`core.place.gang_planner`): the claims of the members, their GPUs,
  and the rules for their trays.
- `trays`: the cluster as the input of the placement search, and why a tray is closed to members.
- `placement`: starts the search and handles its result. It limits the spare trays of a namespace. The
  choice of spare trays is in `core.place.search.tray_assignment` (`trays_that_carry`, `in_spare_order`,
  `spare_trays`).

Why a node is closed to a job: the refusal of the search is the message of the condition Placed
(`reconcile`, reason DoesNotFit). It quotes `PlacementTray.shut` and `closed`. `trays` fills these in, and
lists the rules with the places of their texts.

A new field: the controller makes each GangPlan, and users declare a gang by annotations of its pods.

- An input of users: `GangSpec` and `read_gang_spec` in `core.cluster.gang_objects`, then a field of `Gang`
  (`core.cluster.trays`), which `requests.placement_request` fills in and the search honours.
- `spec.gang`, `spec.plan`: a field of `Gang` or `GangPlan`, with a default, because stored plans lack it. The
  schema, reading and writing follow from it.
- Beside them in `spec`: `RecordSpec`, `GangRecord`, `read_record`, and the writers (`record_plan`,
  `withdraw_plan`, `reduce_plan`) in `snapshot`.
- `status`: a field of `GangStatus` in `snapshot`, which `reconcile.with_status` fills in. The schema, reading
  and writing follow from it.

`deploy/kubernetes/write_crds.py` writes the schema of `crd` into the manifests.
"""
