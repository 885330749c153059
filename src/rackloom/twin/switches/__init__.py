"""Switch fabrics and the controllers that speak for them: NMX-C over gRPC, NMX-M over HTTP."""
