"""Records and rules of the site: tenants, VPCs, machines, instances, partitions; and the store."""
