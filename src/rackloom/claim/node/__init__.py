"""Kubelet DRA plugins: one framework, and three drivers on it (GPUs, NICs, IMEX channels).

A prepare call of kubelet passes these modules, in this order:

- `run`: the gRPC services on unix sockets. It puts all parts of one plugin process together.
- `requests`: one task for each claim, repeated until kubelet's deadline, and then in the background. It
  also makes kubelet call again.
- `prepare`: one crash-safe attempt at one claim, recorded in the checkpoint.
- `gpu`, `nic`, `imex`: the drivers. Each implements the protocol `NodePlugin` of `plugin`.
- `cdi`: the files that describe a container's changes for the runtime, and NVIDIA's device files.

Besides, `slices` keeps the node's ResourceSlices equal to its devices, `fabric` reads the NVLink fabric of
the GPUs, and `storage` keeps a plugin's state on disk. `node_template` makes the slices of a node that
does not exist yet, for an autoscaler.
"""
