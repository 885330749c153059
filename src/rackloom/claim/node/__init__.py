"""Kubelet plugins: one framework, and the devices that it serves (IMEX channels, GPUs, NICs)."""
