"""Collectors of the doctor: they read a cluster, a host's files and saved transfers.

They change nothing, and they run no program. Anything that cannot be read stays unknown in the evidence.
"""
