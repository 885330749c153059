"""The doors of the site: REST, and who may come through them."""
