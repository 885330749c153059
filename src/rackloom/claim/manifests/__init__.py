"""Kubernetes manifests in files: read into the values of the allocator. The only I/O of planning."""
