"""Many gangs at once: `batch` is the door; `packing` and `exact` solve a few cliques, `improve` many."""
