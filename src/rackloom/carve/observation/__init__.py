"""Readings of controllers: the latest valid reading of each domain, and conflicting controllers."""
