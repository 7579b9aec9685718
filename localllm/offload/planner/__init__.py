"""Plan where each block of a model is placed: search, costs, and the measured speeds of this machine."""
