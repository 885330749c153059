"""The life of ComputeDomains and gangs in virtual time, with one disruption at every crash point.

The controllers, the IMEX plugin and the IMEX daemon are production code. `story` is the entry point.
"""
