"""From objects to values: who asks for what, and what there is.

`shapes` refuses what core/v1 would not take.
`counts`, `pods`, `jobs`, `asks` and `priorities` read what is asked for; `node_rules` and `neighbours` where
pods may go (known by `made_labels` of their controllers, too), and `terms` what that is for groups.
`observed`, `devices` and `rooms` (which asks claim/allocate) read what there is, `bound` where that may be
moved, by `foes` among the rest: whom it is never beside.
"""
