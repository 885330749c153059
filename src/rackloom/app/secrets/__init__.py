"""Where passwords and keys come from: one protocol, one module per place."""
