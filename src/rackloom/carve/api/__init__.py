"""The REST interface for tenants and providers: authentication, resources, events.

Each resource module holds its request and response models, its queries and its routes.
"""
