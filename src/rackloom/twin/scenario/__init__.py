"""Incidents as files: what is done to a simulated site, what breaks, and what must be seen of it."""
