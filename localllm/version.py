"""The version of this package, for the build and for whoever sends or shows it."""

__version__ = "0.1.0"
