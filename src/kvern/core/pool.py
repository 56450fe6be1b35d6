"""The block pool: who holds which page, which pages are free, which are cached.

    free      on the stack, refs 0, no node            may be handed out
    in use    refs > 0                                 open (one table) or sealed (any number)
    cached    refs 0, has a node in the prefix tree    kept for later hits, may be replaced
    null      block 0                                  never handed out

`free + cached + in use + 1 = num_blocks` holds after every call. A page is a page: groups of
different reach draw from the same pool. All per-block state lies in numpy columns, about 34 bytes
per block, so that a pool of a million blocks stays small.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from kvern.core.replacement.queues import VictimQueue
from kvern.core.sequence import Int32
from kvern.errors import IntegrityError

EMPTY: Int32 = np.zeros(0, np.int32)


class BlockPool:
    """Reference counts and the free list of `num_blocks` uniform pages.

    Attributes:
        num_blocks: pages, the null block included.
        refs: holders per block, int32 `[num_blocks]`.
        node: the prefix-tree node whose content a block holds, 0 for none, int32.
        column: the prefix tree's column that a published block stands in, uint16.
        num_free: blocks on the free stack.
        num_cached: published blocks that nobody holds.
    """

    def __init__(self, num_blocks: int, queue: VictimQueue) -> None:
        self.num_blocks = num_blocks
        self.refs: Int32 = np.zeros(num_blocks, np.int32)
        self.node: Int32 = np.zeros(num_blocks, np.int32)
        self.column: npt.NDArray[np.uint16] = np.zeros(num_blocks, np.uint16)
        self.queue = queue
        self.num_cached = 0
        self.num_free = num_blocks - 1
        self._stack: Int32 = np.arange(num_blocks, 0, -1, dtype=np.int32)[1:].copy()
        self._forget: Callable[[Int32], Int32] | None = None

    def on_replace(self, forget: Callable[[Int32], Int32]) -> None:
        """Register who unnames replaced blocks; it returns further pages that fall with them."""
        self._forget = forget

    @property
    def num_available(self) -> int:
        """Blocks that `allocate` can hand out: free ones and, after them, cached ones."""
        return self.num_free + self.num_cached

    @property
    def num_in_use(self) -> int:
        """Blocks that somebody holds."""
        return self.num_blocks - 1 - self.num_free - self.num_cached

    def allocate(self, count: int) -> Int32 | None:
        """Hand out `count` blocks with one reference each, all or none.

        Free blocks go first, then cached ones in the order of the replacement policy.
        """
        if count > self.num_available:
            return None
        if count > self.num_free:
            self._replace(count - self.num_free)
        self.num_free -= count
        blocks = self._stack[self.num_free : self.num_free + count][::-1].copy()
        self.refs[blocks] = 1
        return blocks

    def hold(self, blocks: Int32) -> None:
        """Add a reference to distinct blocks; cached ones come back into use."""
        counts = self.refs[blocks]
        self.num_cached -= len(blocks) - int(np.count_nonzero(counts))
        self.refs[blocks] = counts + 1
        self.queue.used(blocks)

    def num_idle(self, blocks: Int32) -> int:
        """How many of the blocks are cached at present: holding them would take these away."""
        return len(blocks) - int(np.count_nonzero(self.refs[blocks]))

    def release(self, blocks: Int32) -> None:
        """Drop a reference from distinct blocks, those to be replaced first in front.

        A published block that nobody holds any more is cached; another one becomes free.
        """
        counts = self.refs[blocks] - 1
        self.refs[blocks] = counts
        idle = blocks[counts == 0]
        if len(idle) == 0:
            return
        published = self.node[idle] != 0
        num_published = int(np.count_nonzero(published))
        if num_published == len(idle):
            self.num_cached += num_published
            self.queue.push(idle)
            return
        if num_published:
            self.num_cached += num_published
            self.queue.push(idle[published])
            idle = idle[~published]
        self._free(idle)

    def release_entry(self, pages: Int32) -> None:
        """Drop a reference from the pages of one state; its first stands for it in the queue."""
        counts = self.refs[pages] - 1
        self.refs[pages] = counts
        if counts[0]:
            return
        if self.node[pages[0]]:
            self.num_cached += len(pages)
            self.queue.push(pages[:1])
        else:
            self._free(pages)

    def publish(self, blocks: Int32, nodes: Int32, column: int) -> None:
        """Note that held blocks now carry the content of prefix-tree nodes."""
        self.node[blocks] = nodes
        self.column[blocks] = column
        self.queue.stored(blocks)

    def unpublish(self, blocks: Int32) -> None:
        """Note that blocks no longer carry a node's content; unheld ones become free."""
        self.node[blocks] = 0
        idle = blocks[self.refs[blocks] == 0]
        self.num_cached -= len(idle)
        self.queue.forget(blocks)
        self._free(idle)

    def _replace(self, count: int) -> None:
        if self._forget is None:
            raise IntegrityError(f"{self.num_cached} blocks are cached in a pool without an index")
        target = self.num_free + count
        while self.num_free < target:
            victims = self.queue.pop(target - self.num_free, self.refs)
            if len(victims) == 0:
                raise IntegrityError(
                    f"the pool counts {self.num_cached} cached blocks and its queue holds none"
                )
            self.unpublish(np.concatenate((victims, self._forget(victims))))

    def _free(self, blocks: Int32) -> None:
        end = self.num_free + len(blocks)
        self._stack[self.num_free : end] = blocks
        self.num_free = end

    def reset(self, refs: Int32, free: Int32) -> None:
        """Set all counts anew: `refs` per block, nothing cached, `free` on the stack."""
        self.refs[:] = refs
        self.node[free] = 0
        self.queue.forget(free)
        self.num_cached = 0
        self.num_free = 0
        self._free(free)

    def free_blocks(self) -> Int32:
        """The blocks on the free stack, in no particular order."""
        return self._stack[: self.num_free]
