"""Measure this machine with torch: the figures of `planner.profile`."""
