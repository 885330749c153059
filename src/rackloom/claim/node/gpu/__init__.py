"""The kubelet plugin of gpu.nvidia.com: whole GPUs, MIG devices and GPUs for virtual machines (VFIO).

`inventory` and `nvml` read the GPUs. `inventory` also describes a GPU as a device of a slice. `monitor` keeps
conditions, taints and health over time. `sharing` decides how the GPUs of a claim are shared and carries it
out: time slices by `driver_programs`, MPS daemons by `mps`. `plugin` prepares claims.
"""
