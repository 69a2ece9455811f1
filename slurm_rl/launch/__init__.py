"""Jobs: the schedulers, the supervisor, and how a stage's program is started."""
