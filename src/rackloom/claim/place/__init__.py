"""Whole jobs onto NVLink cliques. Pure.

- The words: `values` (site, gang, plan), `labels` (what vendors call things).
- The doors: `gang` plans or refuses one, `many` a batch, `replace` a lost tray, `defrag` empties trays and
  cliques; `reserve` holds what is planned, `notes`, `segments` and `unhonoured` tell of it.
- Behind them: `reading` (from objects to values), `search` (one gang onto a site), `refusal` (why not).
- `render`: a placed job for a scheduler. `instances`: the trays of a tenant's instances, for carve.
"""
