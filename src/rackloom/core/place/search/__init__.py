"""The search that places one gang onto a site.

The question is a variant of bin packing: colocation groups (items) into cliques (bins), and within a
clique members onto trays. `clique_search` chooses a clique per group by backtracking; `tray_assignment`
puts the members onto trays and chooses spare trays; `gang_needs` has what the gang asks for, and answers
by counting what needs no search; `site_view` keeps a site between plans, and `site_capacity` is that view as
the gang meets it. `gang_planner` builds the plan from the result. A `SearchBudget` bounds
all searches made for one gang.
"""
