"""NMX-M: REST to the manager of switch controllers, with asynchronous operations."""
