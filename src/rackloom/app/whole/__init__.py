"""The whole twin in one process: the site service, and a cluster whose nodes are the site's trays."""
