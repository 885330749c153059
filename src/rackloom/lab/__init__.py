"""Simulators of everything around Rackloom, for the demo, the tests, rehearsals and incident replay.

The production code runs unchanged on these simulators. No simulator is imported by the verbs
themselves.

- `virtual`: virtual time, the process model (start, kill, stop and resume), the network, racks, the
  site service.
- `switches`: NVLink fabrics and the NMX-C and NMX-M controllers in front of them.
- `kube`: an in-process Kubernetes API server with small controllers and a scheduler.
- `nodes`: the node model, and compute trays as Kubernetes nodes: kubelets, DRA manager, GPU driver,
  host files, NRI runtime.
- `imex`: stand-ins for nvidia-imex and nvidia-imex-ctl, as programs, over loopback sockets, and in
  memory.
- `faults`: the fault catalogue: each fault of racks once, for random runs and for scenarios.
- `invariants`: the promises S1, S2 and S4 of the design, checked against ground truth.
- `scenario`: incidents as files. `scenarios/` holds those that ship.

Simulations that only tests run are in `tests/simulation`: random load and faults on the site service, and
the life of ComputeDomains with one disruption at every crash point.
"""
