"""Pure decisions about network devices (dra.net): which to publish, how to attach, when to renew.

`devices` turns a snapshot of a host into published devices. `attachment` decides the settings of an interface
in a pod. `lease` is the DHCP client's state machine. `claim.node.nic` does the I/O.
"""
