"""Kubernetes as Rackloom sees it: a narrow API, an informer and leader election."""
