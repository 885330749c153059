"""The twin as a process: a simulated site, and a simulated cluster whose nodes are the site's trays.

`site` is the embedded site on simulated switches, `cluster` the Kubernetes cluster of its trays,
`pods` what runs in its containers. `up` joins them for `rackloom up`, and `scenarios` plays incidents on
them for `rackloom twin play`.
"""
