"""ComputeDomain controller: what each ComputeDomain needs in the cluster, kept so; and its teardown."""
