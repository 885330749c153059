"""The demonstration: carve, claim and prove told as one story, each step verified by looking."""
