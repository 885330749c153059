"""The kubelet plugins of one node as processes: GPUs, IMEX channels and NICs.

`process` holds what every plugin process has: API server, signals, metrics and health probes. `gpu`,
`imex` and `nic` build one plugin each from its options and serve it.
"""
