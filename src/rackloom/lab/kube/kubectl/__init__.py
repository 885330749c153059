"""The parts of the simulated API server that only kubectl needs.

Tables for `kubectl get`, strategic merge patches and protobuf bodies that kubectl writes, discovery
documents, and an ASGI application for a kubeconfig. Nothing of Rackloom uses these paths. They can be
removed together.
"""
