"""Running NVIDIA's IMEX daemon for one ComputeDomain on one node."""
