"""NVLink partitions in the records: operations and ownership, intent, and found partitions."""
