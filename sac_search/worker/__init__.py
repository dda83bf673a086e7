"""The child process that owns the device and the workload, and its client in the parent."""
