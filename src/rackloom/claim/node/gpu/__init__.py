"""The kubelet plugin of NVIDIA GPUs: whole GPUs, MIG devices, and GPUs that are passed through."""
