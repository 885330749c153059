"""The rack map: one page that shows what every layer reports about the racks, kept up to date.

The data flows one way: `model` (every GPU at its position) -> `tenancy` (the part that one tenant may see) ->
`frames` (the input of the drawing of one rack) -> `overview` (the numbers of the site, and a rack as one
cell) and `racks` (a rack drawn whole, on demand) -> `render` (markup) -> `painters` (the parts that changed
since a reading). `live` keeps the newest reading and `history` those of the last day. `trends` makes charts
of these, and `changes` compares one of them with the present. `view` reads the address of a page, and
`pages` answers browsers.
"""
