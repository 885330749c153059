"""The carve plane under random load and faults in virtual time, and the judges of what it does."""
