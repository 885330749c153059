"""Access to the Kubernetes API: a narrow protocol, informers, leader election, events.

`api` is the protocol that everything else depends on. `client` implements it over HTTP, and the
in-process fake of the lab implements it, too. Objects are plain JSON mappings.
"""
