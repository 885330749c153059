"""resource.k8s.io objects in, an allocation or a refusal with reasons out. Pure."""
