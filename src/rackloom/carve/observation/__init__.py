"""What controllers show: the latest valid reading of each domain, and conflicting controllers."""
