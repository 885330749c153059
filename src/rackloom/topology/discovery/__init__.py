"""Discovery of the machine that this process runs on, or of a copy of its /sys and /proc.

`sysfs` reads the kernel's files into a `HostReading`, `nvidia_driver` finds NVIDIA's driver and
reads NVML, and `discover` fuses both with vendor files and declarations into a machine profile.
"""
