"""Runs programs that a model wrote: bounded, and cut off from everything but its own folder.

`runner` is for callers. `jail` is the process that encloses one run, `confine` what it asks of the
kernel; both are standard library only, since they start anew for each run. This module imports
nothing for the same reason.
"""
