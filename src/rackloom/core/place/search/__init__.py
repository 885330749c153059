"""The search that places one gang onto a site.

The question is a variant of bin packing: colocation groups (items) into cliques (bins), and within a
clique members onto trays. `clique_search` chooses a clique per group by backtracking; `tray_assignment`
puts the members onto trays and chooses spare trays; `site_capacity` has what the gang asks for, and answers
by counting what needs no search. `gang_planner` builds the plan from the result. A `SearchBudget` bounds
all searches made for one gang.
"""
