"""Many gangs at once: `batch` is the door; `singly` places them in turn, `whole` packs those of whole trays.

`packing` and `exact` solve a few cliques, `improve` many.
"""
