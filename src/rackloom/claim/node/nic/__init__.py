"""The kubelet plugin of dra.net: network interfaces and RDMA devices for pods.

- `inventory` observes the host's NICs, and `rackloom.core.nics.devices` decides which are published.
- `plugin` prepares claims. Preparing only reads. The NIC moves when the container runtime starts the
  pod's sandbox.
- `attach` moves NICs into sandboxes and back, with `links`, `rdma` and `datapath` for the kernel's
  interfaces and `netlink` for the wire.
- `dhcp` requests addresses, `leases` stores them and `renewal` keeps them.
- `status` reports to the claim, to the pod's events and to metrics.
- `metadata` queries the cloud's metadata service. `rackloom.core.nics.cloud` knows the queries.
- `config` reads the operator's files and the filter expression.
"""
