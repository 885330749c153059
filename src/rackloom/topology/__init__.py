"""The wiring: racks, NVLink domains, trays, NUMA nodes, PCIe trees, GPUs and NICs.

- `join_key`: facts with their source, and the join key that links the names of one GPU in all layers.
- `machine`: a machine as the kernel reports it, and the machine profile that is derived from it.
- `affinity`: the path class of each GPU and NIC pair, and which NIC belongs to which GPU.
- `nics`: the NICs of a machine, and the interfaces that must not be given to a tenant.
- `rack`: rack profiles, and the site that they describe.
- `profiles`: the machine and rack profiles that ship with Rackloom.
- `discovery`: reads a running machine. It is the only part that does I/O beyond the shipped profiles.
"""
