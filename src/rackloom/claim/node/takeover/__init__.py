"""Takeover of one node from the drivers that Rackloom replaces, and back.

From NVIDIA's DRA driver prepared claims change their checkpoint:

- `nvidia_checkpoint`: the file format of NVIDIA's driver, with its checksums. Pure.
- `claims`: which claim can be taken over or given back, as which entry, and why not. Pure.
- `node_files`: plans for the files of one node, and the writes that carry them out.

From DRANET nothing is taken over (`dranet`): its NICs come back first. `kubelet_state` reads which claims
kubelet holds.
"""
