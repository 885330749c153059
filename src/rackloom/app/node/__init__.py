"""The kubelet plugins of one node as processes: GPUs, IMEX channels and NICs.

`process` holds the common parts of every plugin process: API server, signals, metrics and health probes.
`gpu`, `imex` and `nic` build one plugin each from its options and serve it. `together` serves all three.

A plugin runs on every node beside the workload, so its memory counts. pyroute2 gathers modules that no plugin
uses: without them, a process with the NIC plugin is 8 MiB smaller (14 %).
"""

from rackloom.runtime.lean_imports import defer_package

defer_package("pyroute2")
