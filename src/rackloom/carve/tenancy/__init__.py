"""What tenants have: entitlements, instances, interfaces, logical partitions, VPCs and their statuses."""
