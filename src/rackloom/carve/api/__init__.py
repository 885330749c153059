"""The doors: REST and authentication."""
