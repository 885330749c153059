"""The site service, `rackloom serve`: everything that one site runs, in one process.

`service` starts and stops everything. `parts` builds the parts from the configuration. `switches` opens
switch controllers, `secrets` and `secret_stores` read their credentials, `issuers` and `host_state` poll
external sources, `audit_log` writes and prunes the audit log, `cluster` and `rack_map` feed the rack map, and
`metrics` with `record_counts` serves Prometheus.
"""
