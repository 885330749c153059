"""Admission: what is said to claims and pods when they are created, and the gate of pods that came early."""
