"""Reading the machine that this runs on, or a copy of one's /sys and /proc, into a machine profile."""
