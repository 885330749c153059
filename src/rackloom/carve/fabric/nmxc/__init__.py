"""NMX-C: gRPC to the controller that runs on a switch tray. `nmx_c.proto` is written by this project."""
