"""Many gangs at once: `batch` is the door; `singly` places them in turn, `whole` packs those of whole trays.

`packing` and `exact` solve a few cliques, `improve` many. `alone` gives each share of one gang a clique.
`strangers` are jobs that share no tray.
"""
