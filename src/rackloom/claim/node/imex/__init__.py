"""The kubelet plugin of compute-domain.nvidia.com: IMEX channels and daemons of one node.

`devices` decides which devices a node publishes and which a claim may have. `domains` and `labels` read and
write the cluster state that a channel waits for. `plugin` prepares claims. The fabric itself is
`claim.node.fabric`.
"""
