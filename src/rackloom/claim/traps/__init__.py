"""Traps in claims and classes: what the API server takes and the hardware does not."""
