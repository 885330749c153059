"""Carve: NVLink partitions, from a tenant's request to the switch controller and back.

The packages, from the lowest layer to the highest. Each imports only those above it in this list.

- `fabric`: drivers for switch controllers, one package per protocol (NMX-C over gRPC, NMX-M over REST).
- `store`: tables, migrations, transactions on SQLite and PostgreSQL, journals, shared values.
- `observation`: the latest valid reading of each NVLink domain, and conflicts between controllers.
- `partitions`: which partitions exist and who owns them, and the intent that the planner receives.
- `tenancy`: organizations, quotas, VPCs, logical partitions, instances, and their statuses.
- `inventory`: machines and controller endpoints, how an observation updates them, maintenance by
  operators.
- `reconcile`: passes that observe a domain, plan, check and execute, under a lease.
- `api` and `admin`: the REST interface for tenants and providers, the gRPC interface for operators.

`core.partitions` makes the decisions (planner, independent check, status rules) and does no I/O.
"""
