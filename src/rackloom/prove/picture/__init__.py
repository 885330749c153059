"""One picture of a site: what every layer says of the same racks, side by side and joined by the join key."""
