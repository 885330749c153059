"""Composition: which parts run together in which process, and nothing else.

One module or package per process. `site` is the site service (`rackloom serve`), `controller` the elected
controllers, `webhook` the admission webhook, `node` the kubelet plugins, `imex` one IMEX daemon, `doctor`
the examination of a site, `slurm_topology` the keeper of Slurm's blocks, `uninstall` the removal from a
cluster, `twin` the simulated site (`rackloom up` and `rackloom twin play`), and `demo` the demonstration.

`config`, `process`, `repeated_lines`, `listeners` and `home` are shared by several processes. Decisions
belong in `core`, work on one system belongs in `carve`, `claim` or `prove`. Here they are only connected.
Packages below `app` read no configuration: each process passes them the parameters that they need.
"""
