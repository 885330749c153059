"""The switch controllers: one driver per protocol, all behind `ports.FabricDriver`."""
