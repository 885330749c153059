"""Simulators only: switch controllers and machines, for the demo, the tests and rehearsals."""
