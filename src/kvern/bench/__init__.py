"""Measured comparisons: this engine, the machine's limits, and other engines, on the same work.

session   one worker process per engine, runs interleaved, one document at the end
works     what is computed: the cases, their sizes and their prompts, the same for every engine
serve     the loop inside a worker process; standard library only, runs in any environment
own       what the worker of this engine does; other engines' adapters do the same for theirs
figures   from raw times to TTFT, TPOT and throughput;  stats: medians, spread, pairwise ratios
recording where a step's time goes;  breakdown: what it was bound by
"""
