"""The KV-cache transfer: two ends, one registered buffer each, one-sided operations, proof of the data.

`run` measures one pair of ends, two arms, or every pair of a claim; `lanes` runs pairs at the same time;
`end` is the process of one end; `emulate` builds two pods out of network namespaces where there is no RDMA.
`records`, `comparison`, `gate`, `tables`, `plot` and `page` are what is done with a measurement.
"""
