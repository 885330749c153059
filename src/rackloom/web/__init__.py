"""The rack map: one page that shows what every layer reports about the racks, kept up to date.

The data flows one way: `model` (every GPU at its position) -> `tenancy` (what one tenant may see) ->
`frames` (what the drawing of one rack depends on) -> `racks` (a rack as drawn) -> `render` (markup) ->
`painters` (what changed since which reading). `live` keeps the newest reading, and `pages` answers
browsers.
"""
