"""Virtual time: event loop, processes, network, racks, and the site service that runs in it.

A simulated run is a function of its seed. Nothing in this package opens a socket, starts a thread or
reads the clock of the machine.
"""
