"""The operator's interface: gRPC over mutual TLS.

It serves RPCs of upstream's `forge.Forge` service, and this project's `rackloom.admin.v1.Operator`
service.
"""
