"""Listeners and their limits: connections, requests, shares of clients, HTTP and gRPC."""
