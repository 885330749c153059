"""A plugin of the container runtime's Node Resource Interface (NRI): is told of every pod sandbox."""
