"""The loop that makes the fabric what the records want, and records what it saw."""
