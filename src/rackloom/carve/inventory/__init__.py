"""Machines and controller endpoints: enrolment, synchronization with observations, and maintenance."""
