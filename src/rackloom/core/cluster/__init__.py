"""Kubernetes objects as decisions see them: types, the parts that are read, and writes as values.

Decisions never call the API server. They receive objects as plain JSON and return writes; `claim.kube`
and `claim.cluster` read the objects and send the writes.
"""
