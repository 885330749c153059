"""What is wired to what: site, rack, NVLink domain, tray, NUMA node, PCIe tree, GPU, NIC. Pure values."""
