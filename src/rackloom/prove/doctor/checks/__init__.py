"""Pure checks: evidence in, findings with a fix out."""
