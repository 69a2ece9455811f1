"""The configuration: what a person writes, and what a run is told."""
