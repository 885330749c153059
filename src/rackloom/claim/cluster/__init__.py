"""The Kubernetes controllers for ComputeDomains and gangs, the admission webhook, and the uninstaller.

The decisions are pure functions in `core.domains` and `core.gangs`. This package reads the cluster,
carries out what was decided, and reports it in status, events and metrics.
"""
