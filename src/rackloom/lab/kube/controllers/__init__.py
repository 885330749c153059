"""Small stand-ins for the controllers of a cluster, so that ours run end to end in one process.

Each has `run()`, which works until it is cancelled. They read the store itself, which is never behind,
and write through the API as `kube-controller-manager`, `kube-scheduler` or `mpi-operator`. Their writes are
counted, delayed and made to fail like those of any client. Rolling updates, preemption and scoring are not
simulated.
"""
