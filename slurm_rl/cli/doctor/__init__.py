"""doctor: whether file system, site and configuration are fit for a run, and what to set."""
