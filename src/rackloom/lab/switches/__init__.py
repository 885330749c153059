"""Simulated NVLink switch fabrics and their controllers: NMX-C over gRPC, NMX-M over HTTP."""
