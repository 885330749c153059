"""Package rackloom.core."""
