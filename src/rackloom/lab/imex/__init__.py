"""Stand-ins for NVIDIA's IMEX programs, for machines where those are not installed.

`python -m rackloom.lab.imex.service -c FILE` takes the place of nvidia-imex, and `python -m
rackloom.lab.imex.ctl` that of nvidia-imex-ctl: the same options, configuration file, ports, signals,
status words, JSON, refusals and delays, as observed of versions 580, 595 and 615 without GPUs. The protocol
between two stand-ins is not NVIDIA's, and no memory is shared.
tests/claim/imex/test_imex_contract.py runs the same cases on these programs and on NVIDIA's.
"""
