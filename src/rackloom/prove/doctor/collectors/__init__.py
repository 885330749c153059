"""Where the evidence comes from: a cluster's API server, and a host's files."""
