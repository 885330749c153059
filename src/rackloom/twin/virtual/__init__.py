"""What runs the production code in virtual time, without sockets: the loop, the wire, racks, processes."""
