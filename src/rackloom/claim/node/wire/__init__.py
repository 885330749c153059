"""What kubelet and a plugin say to each other: our own protos with kubelet's names and numbers."""
