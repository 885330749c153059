"""The twin as a process: a simulated site, and a simulated cluster whose nodes are the site's trays.

`site` is the embedded site on simulated switches, `cluster` the Kubernetes cluster of its trays, `pods`
what runs in its containers; `guest` has the trays join a cluster of others. `up` joins them for `rackloom
up`, with `real_site`, whose service can be killed, and `control`, by which `control_client` plays steps on
them (`control_messages`). `scenarios` plays incidents on a twin of their own for `rackloom twin play`.
"""
