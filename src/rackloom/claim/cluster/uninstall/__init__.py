"""Removing an installation of deploy/kubernetes from a cluster: observe, plan, act, observe again."""
