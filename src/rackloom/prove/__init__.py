"""Proof by measurement: transfers between two placed ends, and collectors of evidence.

`transfer` moves data between two ends and shows which device carried it. `collectors` turn the Kubernetes
API, the files of a host and saved transfer records into the values that `core.diagnosis` checks.
"""
