"""The decisions about KV-cache transfers: pairs to measure, proof, statistics, reports and verdicts.

Read in this order: `values` (request, observations, report), `pairing` (a NIC and processors for each
GPU), `proof` (which device carried the bytes, and whether the rate met the promise), `statistics` (of
repeated runs), `report` (observations of both ends to one report), `records` (a report as it is kept),
`comparison` (two records, and a record against a baseline). `model` predicts rates from the wiring alone,
`kv_cache` expresses a rate as the hand-over of a prompt's cache, and `render` makes tables, SVG and HTML.

Everything here is a pure function of values. `prove.transfer` runs the ends, reads the device counters,
and reads and writes record files.
"""
