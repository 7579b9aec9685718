"""The plan of where a model rests: search, costs, and what this machine was measured to do."""
