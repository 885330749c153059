"""A cluster with ComputeDomains in virtual time: real controller, plugins and daemons, and their deaths."""
