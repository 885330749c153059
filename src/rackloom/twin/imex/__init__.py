"""A stand-in for NVIDIA's IMEX programs, where theirs are not installed.

`python -m rackloom.twin.imex.service -c FILE` takes the place of nvidia-imex and `python -m
rackloom.twin.imex.ctl` that of nvidia-imex-ctl: the same options, configuration file, ports, signals, status
words, JSON, refusals and delays, as observed of versions 580, 595 and 615 without GPUs. What two stand-ins
say to each other is not NVIDIA's protocol, and no memory is shared. tests/claim/imex/test_imex_contract.py
runs the same cases on it and on NVIDIA's programs.
"""
