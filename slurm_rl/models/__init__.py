"""What a model is, by its files: shape, names of weights, how it can be laid out over ranks.

Pure but for reading `config.json` and the headers of weights; neither torch nor Megatron is
imported, so that a login node can judge a model before a job is submitted. To add a family, see
`families_table.py`.
"""
