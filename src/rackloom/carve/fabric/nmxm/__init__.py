"""NMX-M: the switch controllers' REST interface, with asynchronous operations."""
