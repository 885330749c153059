"""The search that chooses trays for all callers: gangs, batches, job moves, instances of tenants, the map.

The problem is a variant of bin packing: colocation groups (items) into cliques (bins), and within a clique
members onto trays. `clique_search` is the entry: it chooses a clique for each group by backtracking.
`tray_assignment` puts the members onto trays and chooses spare trays. `gang_needs` holds the request of a
gang, and bounds by counting that make a search unnecessary. `site_view` keeps a site between plans, and shows
it as one gang can use it. `packing` weighs gangs of a batch against each other. `gang_planner` builds the
plan from the result. A `SearchBudget` bounds all searches made for one gang.
"""
