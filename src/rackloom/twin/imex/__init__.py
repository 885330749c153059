"""A stand-in for NVIDIA's IMEX programs, where theirs are not installed.

`python -m rackloom.twin.imex.service -c FILE` takes the place of nvidia-imex and `python -m
rackloom.twin.imex.ctl` that of nvidia-imex-ctl: the same options, configuration file, ports, signals, status
words and JSON. What two daemons say to each other is not NVIDIA's protocol, and no memory is shared.
"""
