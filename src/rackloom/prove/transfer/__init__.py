"""The KV-cache transfer: two ends, one registered buffer each, one-sided WRITE, proof of the data."""
