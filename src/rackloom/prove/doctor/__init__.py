"""What is wrong on the way from a manifest to shared GPU memory, and what to do about it."""
