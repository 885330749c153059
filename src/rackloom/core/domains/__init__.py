"""ComputeDomains as values: names, objects, clique membership, CRDs and opaque device configurations.

`names` holds labels, annotations, classes and limits; `compute_domain` and `clique` the two objects;
`crds` their definitions; `quota` the Workload of Kueue that counts one; `device_configs` the configs of the
IMEX and GPU drivers; `network_config` that of the network driver; `imex_settings` what operators may set of
nvidia-imex.
"""
