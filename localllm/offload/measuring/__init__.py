"""What this machine can do, measured with torch: the figures of `planner.profile`."""
