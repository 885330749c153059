"""Carve: NVLink partitions, from a tenant's request to the switch controller and back."""
