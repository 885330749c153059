"""KV-cache transfers with NIXL between two ends, with proof of the data and of the path.

Each end is a process, the initiator or the target (`end`, `endpoints`). They agree over an authenticated
control channel (`channel`), register a buffer in host or GPU memory (`buffers`) with NIXL on UCX
(`agent`), and move it many times with one-sided operations. `proof` decides from device counters which
device carried the bytes, `report` turns both ends' observations into one report. `run` drives the
measurements that a user can ask for, `processes` starts and stops the ends, `emulation` builds two pods
from network namespaces where there is no RDMA.

`records` keeps reports in files, `comparison` compares two of them, `render` shows them as tables, SVG
and HTML. `pairing` chooses NICs for GPUs, `model` predicts rates from the wiring alone, `fallback` works
without NIXL.
"""
