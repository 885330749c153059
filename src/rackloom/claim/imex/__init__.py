"""Running NVIDIA's IMEX daemon for one ComputeDomain on one node.

`daemon` puts the parts together. `member` writes this node's entry in the clique object. `supervisor`
keeps nvidia-imex running with the newest peers. `nvidia_imex` runs and queries the program, and `config`
writes its files.
"""
