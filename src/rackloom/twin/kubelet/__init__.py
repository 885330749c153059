"""A kubelet's side of device plugins, over real sockets: registration, prepare, unprepare, health."""
