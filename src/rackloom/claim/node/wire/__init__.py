"""Messages of kubelet's plugin APIs: DRA v1 and v1beta1, plugin registration, DRA health (generated)."""
