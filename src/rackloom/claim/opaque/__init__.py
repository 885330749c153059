"""Opaque device configs of `gpu.nvidia.com` and `dra.net` claims: strict reading, and what they must obey."""
