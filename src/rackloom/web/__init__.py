"""The rack map: one page that shows what every layer reports about the racks, kept up to date.

The data flows one way: `model` (every GPU at its position) -> `tenancy` (what one tenant may see) ->
`frames` (what the drawing of one rack depends on) -> `overview` (the numbers of the site, and a rack as one
cell) and `racks` (a rack drawn whole, on demand) -> `render` (markup) -> `painters` (what changed since which
reading). `live` keeps the newest reading and `history` those of the last day, of which `trends` makes charts
and `changes` what has changed since. `view` is what the address of a page asks for, and `pages` answers
browsers.
"""
