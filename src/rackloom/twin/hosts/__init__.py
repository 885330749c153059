"""A machine profile as the host, the driver and the container runtime that it would be."""
