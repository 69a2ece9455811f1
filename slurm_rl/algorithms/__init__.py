"""What an algorithm computes, as pure functions on tensors: no model, no files, no ranks.

Each function cites its paper and states its denominator. Legend of shape suffixes, here and
in the modules: B samples, G groups, N response tokens of several samples laid end to end.
"""
