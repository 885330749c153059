"""Claim: devices and channels on Kubernetes."""
