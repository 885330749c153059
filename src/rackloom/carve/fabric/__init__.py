"""Drivers for switch controllers: one package per protocol, all behind `controller.FabricDriver`."""
