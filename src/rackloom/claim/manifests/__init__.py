"""Reading Kubernetes objects from files and from a cluster into the values of the allocator.

This is the only I/O of planning. Errors name the file and line.
"""
