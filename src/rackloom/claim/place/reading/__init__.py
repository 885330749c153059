"""From objects to values: who asks for what, and what there is.

`counts`, `pods`, `jobs` and `asks` read what is asked for; `observed`, `devices` and `rooms` (which asks
claim/allocate) what there is.
"""
