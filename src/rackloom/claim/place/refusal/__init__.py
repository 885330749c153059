"""Why a gang does not fit is told by `shortage`; what helps by `fixes`: `cures` of a clique, and `moves`."""
