"""The operator's door: gRPC over mTLS."""
