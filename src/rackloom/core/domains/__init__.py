"""ComputeDomains: clique membership, conditions, manifests, quota, and the definitions of both objects.

`core.cluster.domain_objects` reads the objects. `core.cluster.names` holds labels, annotations and limits.
`observe` takes a snapshot of one domain (`snapshot`), and `reconcile` decides from it. `crds` has the
definitions, `quota` the Workload of Kueue that counts a domain, `network_config` the config of the network
driver, and `imex_settings` the settings of nvidia-imex that operators may choose.
"""
