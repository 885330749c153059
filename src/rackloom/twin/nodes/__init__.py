"""Simulated Kubernetes nodes: what a kubelet writes to the API server, for hundreds of nodes at once."""
