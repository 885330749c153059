"""NMX-C: gRPC to the controller that runs on a switch tray. The protocol is ours to write: `nmx_c.proto`."""
