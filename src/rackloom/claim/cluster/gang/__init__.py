"""The gang controller: whole jobs are placed, reserved, pinned and let go together; kube-scheduler binds."""
