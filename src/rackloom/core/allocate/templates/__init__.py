"""Claim templates for given hardware: selectors that people type by hand, generated and verified.

`inventory` describes node types by their topology and by the devices that their drivers publish. `layout`
decides which GPUs and NICs belong together. `generate` writes the ResourceClaimTemplate and verifies it by
allocating it.
"""
