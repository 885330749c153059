"""The search that places one gang onto a site.

The question is a variant of bin packing: colocation groups (items) into cliques (bins), and within a
clique members onto trays. `clique_search` chooses a clique per group by backtracking, in the order of
`clique_ranking`; `tray_assignment` and `joint_assignment` put the members onto trays; `site_capacity`
answers by counting what needs no search; `gang_search` returns the plan. A `SearchBudget` bounds all
searches made for one gang.

Spare trays: `tray_assignment.spare_trays` says which trays of a clique qualify, and in which order;
`joint_assignment` applies the same rule while it searches; `gang_search` takes as many as the gang asks for.
"""
