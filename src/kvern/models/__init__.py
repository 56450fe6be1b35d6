"""Decoders, declared per family, and their weights."""
