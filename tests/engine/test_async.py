"""The async engine: many tasks, cancellation, refusals and a failing step loop."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from kvern import AsyncLLM, SamplingParams
from kvern.errors import InputError, KvernError


def test_tasks_get_their_own_answers_and_cancelled_ones_give_blocks_back(
    make_tiny: Any, prompts: Any
) -> None:
    params = SamplingParams(max_tokens=16)
    with make_tiny() as llm:
        expected = [out.token_ids for out in llm.generate(prompts, params)]

    async def scenario() -> None:
        llm = make_tiny()
        engine = AsyncLLM(llm)
        doomed = asyncio.create_task(
            engine.generate(list(range(90)), SamplingParams(max_tokens=400))
        )
        answers = asyncio.gather(*(engine.generate(prompt, params) for prompt in prompts))
        await asyncio.sleep(0.01)
        doomed.cancel()
        outs = await answers
        assert [out.token_ids for out in outs] == expected
        with pytest.raises(asyncio.CancelledError):
            await doomed
        for misuse in ([], 12345, [1, 10**9], None):
            with pytest.raises(InputError):
                await engine.generate(misuse, params)
        for _ in range(200):
            if not llm.has_work:
                break
            await asyncio.sleep(0.01)
        assert llm.stats().in_use_blocks == 0
        await engine.close()
        with pytest.raises(KvernError, match="closed"):
            await engine.generate([1], params)

    asyncio.run(scenario())


def test_a_broken_step_loop_answers_everybody_instead_of_hanging(make_tiny: Any) -> None:
    async def scenario() -> None:
        llm = make_tiny()
        engine = AsyncLLM(llm)

        def broken(plan: Any) -> Any:
            raise RuntimeError("the device is gone")

        llm.model.runner.execute = broken
        with pytest.raises(KvernError, match="the device is gone"):
            await asyncio.wait_for(engine.generate([1, 2], SamplingParams(max_tokens=2)), 10)
        with pytest.raises(KvernError, match="the device is gone"):
            await asyncio.wait_for(engine.generate([1, 2], SamplingParams(max_tokens=2)), 10)

    asyncio.run(scenario())
