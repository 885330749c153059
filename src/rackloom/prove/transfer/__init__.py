"""KV-cache transfers with NIXL between two ends, with proof of the data and of the path.

Each end is a process, the initiator or the target (`end`, `endpoints`). They agree over an authenticated
control channel (`channel`), register a buffer in host or GPU memory (`buffers`) with NIXL on UCX
(`agent`), and move it many times with one-sided operations. `devices` reads the view of an end: links, byte
counters, and whether these are the devices of its claim. `run` drives the measurements that a user can
request, `processes` starts and stops the ends, `emulation` builds two pods from network namespaces if
there is no RDMA. `record_files` reads and writes records, `fallback` works without NIXL.

The meaning of the observations (proof of the path, statistics, reports, comparison) is decided in
`core.transfer`.
"""
