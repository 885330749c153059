"""Simulators only: switch controllers and machines, for the demo, the tests and rehearsals.

- Layers on their own: `switches` (fabrics and their controllers), `hosts` (what a machine shows of itself),
  `imex`, `kubelet`, `kube` (an API server with its controllers), `nodes` (trays as nodes of a cluster).
- Virtual time: `virtual` (the event loop, the wire, racks, processes), in it `carving` (random load and
  faults, and who judges what the carve plane does) and `claims` (a ComputeDomain's life, every death in it).
- `scenario` reads and plays scenario files; those that are shipped are in `scenarios`.
"""
