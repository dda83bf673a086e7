"""Several searches of one study, started together: on the devices of a machine, or of a cluster."""
