"""The Node Resource Interface (NRI): a plugin that the container runtime calls for pod sandboxes."""
