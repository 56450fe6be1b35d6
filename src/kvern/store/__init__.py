"""The pool's memory: one slab, typed streams in it, and the block operations."""
