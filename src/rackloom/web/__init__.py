"""The rack map: one page that draws what every layer says of the racks, and stays true while it is open."""
