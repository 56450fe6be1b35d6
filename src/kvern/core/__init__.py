"""Bookkeeping of the cache: pool, tables, prefix index, scheduler. Knows no tensor."""
