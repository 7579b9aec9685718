"""Tools that a model may call: how its family writes calls, how they are read while they are being written, and the
grammar of one that has to be made. Knows no dialect of HTTP."""
