"""One gang onto a site.

`blocks` says what must share a clique, `choose` finds a clique for each, tried in the order of `rank`:
by `outlook` (counting) and `holes` (the price). `sit` puts members on trays with `board` (who is where on
the `ground`, the site as it was), `loads` and `together` (members that compete), within `effort`. What needs
no search is told by weight (`bound` for trays, `scales` for cliques) and by `dead_ends`. `fit` makes the
plan of it.
"""
