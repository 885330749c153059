"""Diagnosis of a site: a snapshot of all layers, their join by GPU identity, checks and causes.

Read in this order: `snapshot` (the values that the layers report), `join` (one chain per GPU through all
layers), `incremental` (the same join, redone only for changed records), `index` (lookups that checks share),
`catalogue` (the names of the checks, and which check explains which), `findings` (the results of checks),
`checks` (one module per subject), `examination` (all checks of a snapshot, consequences folded under their
causes), `reexamination` (the same, only for parts that differ from the last one), `titles` (the problem in
words, and the affected jobs and tenants), `repair_steps` (the commands of a fix and the effect of each),
`runbooks` (background on the findings of each check). `report` renders findings for people and adapts their
fix commands to a site. `acceptance` answers the tests of NVIDIA's acceptance suite from the same findings.
`evidence` holds the input of the ComputeDomain and host checks.

Everything here is a pure function of values. Collectors live in `prove.collectors` and `app.snapshot`.
"""
