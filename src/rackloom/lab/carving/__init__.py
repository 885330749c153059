"""The site service under random load and random faults in virtual time."""
