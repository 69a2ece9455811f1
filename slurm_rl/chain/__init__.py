"""What should run next: the graph, the pure planner, and the effects around it."""
