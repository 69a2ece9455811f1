"""Rollouts: prompts, engines, rewards, the journal, and the format of samples."""
