"""The twin as a process: a simulated site, and a simulated cluster with the site's trays as nodes.

`site` is the embedded site on simulated switches, `cluster` the Kubernetes cluster of its trays, `pods`
the programs in its containers. `guest` has the trays join an existing cluster. `up` joins them for `rackloom
up`, with `real_site`, whose service can be killed, and `control`, by which `control_client` plays steps on
them (`control_messages`). `scenarios` plays incidents on a separate twin for `rackloom twin play`.
"""
