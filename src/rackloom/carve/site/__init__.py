"""Records and rules of a site: tenants, VPCs, machines, instances, partitions; and the store they live in."""
