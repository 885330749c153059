"""The plugin of compute-domain.nvidia.com: IMEX channels and daemons of one node."""
