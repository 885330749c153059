"""The reconciler: makes the fabric what the records want, and records what it observed."""
