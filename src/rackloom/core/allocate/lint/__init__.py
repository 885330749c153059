"""Finds mistakes in claims and classes that the API server accepts and the hardware cannot serve.

`selectors` checks one CEL selector against devices. `claims` checks requests, constraints and whole
claims. Findings come from evaluating selectors and allocating claims, not from matching their text.
"""
