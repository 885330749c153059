"""Names of the attributes by which drivers say where a device sits.

Standard names are those of resource.kubernetes.io (pcieRoot since Kubernetes 1.34, numaNode since 1.37).
"""

PCIE_ROOT = "resource.kubernetes.io/pcieRoot"
NUMA_NODE = "resource.kubernetes.io/numaNode"
NIC_NUMA_NODE = "dra.net/numaNode"
"""What DRANET said before there was a standard name."""
