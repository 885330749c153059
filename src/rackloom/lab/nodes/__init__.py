"""Compute trays as Kubernetes nodes: kubelets, DRA manager, GPU driver and host files.

- `pods` and `kubelets` take the pods of hundreds of nodes through their lives over any `KubeApi`.
- `dra_manager` is a kubelet's bookkeeping of claims.
- `node` is the node model: a disk, boots, and plugins that answer kubelet.
- `trays` runs the three production plugins of each tray, kept in step with the simulated switches by
  `gpus`.
- `host_files` lays out a machine profile as sysfs and procfs.
"""
