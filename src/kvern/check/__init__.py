"""The doctor: proves that answers with the cache equal answers without it, and names what breaks them.

full pass, nothing cached  ----------------------------------+
                                                             == , row by row
chunks, batches, hits, forks, preemptions, aborts  ----------+
              |
              +-- a shadow of every slot, checksums of sealed pages, counters, replays of known faults
"""
