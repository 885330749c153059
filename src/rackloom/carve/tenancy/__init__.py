"""The objects of tenants: entitlements, instances, interfaces, logical partitions, VPCs and their statuses.

`status` writes statuses when a reading is recorded. `outdated` shows them while readings are outdated.
"""
