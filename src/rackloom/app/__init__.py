"""Composition: which rooms run together in which process; nothing else."""
