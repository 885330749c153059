"""Whole jobs onto NVLink cliques. Pure.

- The words: `values` (site, gang, plan), `labels` (what vendors call things).
- From objects to values: `counts`, `pods`, `jobs` and `asks` read what is asked for; `observed`, `devices`
  and `rooms` (which asks claim/allocate) what there is.
- One gang: `blocks` (what must share a clique), `choose` (a clique for each), `rank` (in which order cliques
  are tried) by `outlook` (counting) and `holes` (the price); `sit` (members on trays) with `board` (trays as
  bits), `loads` and `together` (members that compete), within `effort`. `fit` makes the plan of it.
- Refusals: `shortage` says why; `fixes` what would help, by `cures` of a clique and `moves` of running jobs.
- The doors: `gang` plans or refuses one, `batch` many (`packing`, `exact`, `improve`), `replace` a lost tray,
  `defrag` empties trays and cliques; `reserve` holds what is planned, `notes` and `segments` tell of it.
- `render`: a placed job for a scheduler. `instances`: the trays of a tenant's instances, for carve.
"""
