"""Pure decisions about network devices (dra.net): what to publish, how to attach, when to renew.

`devices` turns a snapshot of a host into published devices. `attachment` decides what an interface gets
in a pod. `lease` is the DHCP client's state machine. Whoever does the I/O is `claim.node.nic`.
"""
