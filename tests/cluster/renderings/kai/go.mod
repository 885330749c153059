// KAI, for its schema alone: nothing of it is built.
module rackloom.test/cluster/renderings/kai

go 1.26.0

require github.com/NVIDIA/KAI-scheduler v0.12.0
