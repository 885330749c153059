"""Reading every layer into one picture: the site service's records, the cluster, saved transfers."""
