"""The kubelet plugins of one node as processes: GPUs, IMEX channels and NICs.

`process` holds what every plugin process has: API server, signals, metrics and health probes. `gpu`,
`imex` and `nic` build one plugin each from its options and serve it; `together` serves all three.

A plugin runs on every node beside the workload, so its memory counts. This package, which is imported before
all of them, says what they leave out: coloured tracebacks and green threads in log lines, and what pyroute2
and lightkube have beside the modules that are used here.
"""

from rackloom.runtime.lean_imports import defer_package, import_without

import_without("structlog", "rich", "greenlet")
defer_package("pyroute2")
defer_package("lightkube")
