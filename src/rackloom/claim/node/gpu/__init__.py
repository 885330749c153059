"""The kubelet plugin of gpu.nvidia.com: whole GPUs, MIG devices and GPUs for virtual machines (VFIO).

`inventory` and `nvml` read the GPUs. `inventory` also describes a GPU as a device of a slice. `monitor` keeps
conditions, taints and health over time. `sharing` sets time slices and runs MPS daemons. `plugin`
prepares claims.
"""
