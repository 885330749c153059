"""The search that chooses trays, whoever asks: gangs, batches, moves of jobs, instances of tenants, the map.

The question is a variant of bin packing: colocation groups (items) into cliques (bins), and within a clique
members onto trays. `clique_search` is the entry: it chooses a clique for each group by backtracking.
`tray_assignment` puts the members onto trays and chooses spare trays. `gang_needs` has what the gang
requests, and answers by counting what needs no search. `site_view` keeps a site between plans, and has what a
gang meets of it. `packing` weighs gangs of a batch against each other. `gang_planner` builds the plan from
the result. A `SearchBudget` bounds all searches made for one gang.
"""
