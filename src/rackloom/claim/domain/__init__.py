"""ComputeDomains as values: names, objects, opaque configurations and the rules they follow."""
