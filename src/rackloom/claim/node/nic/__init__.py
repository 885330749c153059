"""The kubelet plugin of dra.net: network interfaces and RDMA devices for pods.

- `inventory` observes the host's NICs; `rackloom.core.nics.devices` decides what is published.
- `plugin` prepares claims. Preparing only reads; the NIC moves when the container runtime starts the
  pod's sandbox.
- `attach` moves NICs into sandboxes and back, with `links`, `rdma` and `datapath` for the kernel's
  interfaces and `netlink` for the wire.
- `dhcp` asks for addresses, `leases` stores them and `renewal` keeps them.
- `status` reports to the claim, to the pod's events and to metrics.
- `metadata` asks the cloud's metadata service; `rackloom.core.nics.cloud` knows what to ask.
- `config` reads the operator's files and the filter expression.
"""
