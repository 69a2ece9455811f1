"""What `tools/chaos.py` is made of.

`schedule` and `report` are pure: which fault comes when, and what all of it came to. `site` is the
cluster and the run as seen from outside, `inject_*` do the harm, `person` mends and resumes.
"""
