"""What `kubectl get` shows: the server makes the columns of a type, not kubectl (meta.k8s.io/v1 Table)."""

from rackloom.twin.kube.printing.table import printed, wants_table

__all__ = ["printed", "wants_table"]
