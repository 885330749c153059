"""Removal of a Rackloom installation from a cluster: read, plan one step, carry it out, read again."""
