"""Intent and observation of one NVLink domain in, a plan of operations out. Pure."""
