"""The plugin of dra.net: network interfaces and RDMA devices, lent to pods and given back."""
