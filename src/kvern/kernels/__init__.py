"""The operation set and its backends."""
