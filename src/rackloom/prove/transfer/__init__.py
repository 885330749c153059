"""The KV-cache transfer: two ends, one registered buffer each, one-sided operations, proof of the data.

`run` measures one pair of ends or an aligned and an unaligned arm; `end` is the process of one end;
`emulate` builds two pods out of network namespaces where there is no RDMA hardware.
"""
