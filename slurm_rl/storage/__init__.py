"""The run directory: durable writes, claims, commits, control, intents."""
