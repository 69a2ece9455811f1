"""The parts of tools/learning_curves.py."""
