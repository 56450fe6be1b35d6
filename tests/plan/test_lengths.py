"""Length distributions: loaders, the simulation and the share of memory that holds something."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvern.errors import FileFormatError, UsageError
from kvern.plan.lengths import Lengths, load_lengths, simulate_concurrency, utilisation

FILES = {
    "mooncake.jsonl": '{"timestamp": 0, "input_length": 100, "output_length": 20, "hash_ids": []}\n'
    '{"timestamp": 3, "input_length": 7, "output_length": 5, "hash_ids": [2]}\n',
    "azure.csv": "TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:15,100,20\nx,7,5\n",
    "burst.csv": "Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type\n"
    "5,ChatGPT,100,20,120,Conversation log\n6,GPT-4,7,5,12,API log\n",
    "bailian.jsonl": '{"chat_id": 1, "parent_chat_id": -1, "timestamp": 1.0, "input_length": 100, '
    '"output_length": 20, "type": "text", "turn": 1, "hash_ids": [1]}\n'
    '{"chat_id": 2, "input_length": 7, "output_length": 5}\n',
    "plain.csv": "100,20\n7,5\n",
    "named.csv": "prompt_tokens,completion_tokens\n100,20\n7,5\n",
    "openai.jsonl": '{"usage": {"prompt_tokens": 100, "completion_tokens": 20}}\n'
    '{"usage": {"prompt_tokens": 7, "completion_tokens": 5}}\n',
    "agent.json": json.dumps(
        {
            "block_size": 64,
            "requests": [{"t": 0, "in": 100, "out": 20}, {"t": 1, "in": 7, "out": 5}],
        }
    ),
}


@pytest.mark.parametrize("name", FILES)
def test_every_format_gives_the_same_lengths(name: str, tmp_path: Path) -> None:
    path = tmp_path / name
    path.write_text(FILES[name])
    lengths = load_lengths(path)
    assert (lengths.prompts, lengths.outputs) == ((100, 7), (20, 5))
    assert lengths.totals == (120, 12)


def test_what_cannot_be_read_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="no such file"):
        load_lengths(tmp_path / "absent.csv")
    for name, text in (("a.csv", "x,y\n1,2\n"), ("b.jsonl", '{"x": 1}\n'), ("c.jsonl", "{oops")):
        path = tmp_path / name
        path.write_text(text)
        with pytest.raises(FileFormatError):
            load_lengths(path)


def test_rows_without_lengths_are_counted(tmp_path: Path) -> None:
    path = tmp_path / "some.jsonl"
    path.write_text('{"input_length": 5, "output_length": 1}\n{"note": "x"}\n')
    assert load_lengths(path).skipped == 1


def test_the_real_traces_load(shared_data: Path) -> None:
    mooncake = load_lengths(shared_data / "traces/mooncake/conversation_trace.jsonl")
    assert len(mooncake.prompts) == 12_031
    assert sum(mooncake.prompts) / 12_031 == pytest.approx(12_035.06, abs=0.01)
    assert sum(mooncake.outputs) / 12_031 == pytest.approx(342.62, abs=0.01)
    azure = load_lengths(shared_data / "traces/azure2023/AzureLLMInferenceTrace_code.csv")
    assert len(azure.prompts) == 8_819
    session = next((shared_data / "traces/weka_claude_code").glob("*.json"))
    assert load_lengths(session).layout == "agent session"


def test_equal_lengths_fit_exactly_as_often_as_the_mean_says() -> None:
    result = simulate_concurrency([160] * 50, lambda n: -(-n // 16), 1_000)
    assert set(result.fits.values()) == {100}
    assert result.mean_based == 100
    assert result.mean_error == 0


def test_the_same_seed_gives_the_same_answer_and_more_certainty_fewer_requests() -> None:
    generator = random.Random(1)
    totals = [generator.randint(10, 4000) for _ in range(500)]
    first = simulate_concurrency(totals, lambda n: -(-n // 16), 5_000, seed=7)
    again = simulate_concurrency(totals, lambda n: -(-n // 16), 5_000, seed=7)
    assert first == again
    assert first.fits[0.5] >= first.fits[0.9] >= first.fits[0.99] > 0
    assert first.mean_error > 0  # the mean promises more than the 99 % case holds


def test_requests_beyond_the_pool_are_left_out_and_counted() -> None:
    result = simulate_concurrency([100, 100, 100, 9_999], lambda n: n, 500)
    assert result.too_long == 0.25
    assert result.fits[0.5] == 5
    with pytest.raises(UsageError, match="no request of the trace fits"):
        simulate_concurrency([9_999], lambda n: n, 500)


def test_paging_holds_above_96_percent_where_reservation_does_not() -> None:
    """ShareGPT's means, 161 prompt and 338 output tokens, block 16 and a limit of 2,048."""
    generator = random.Random(3)
    prompts = tuple(max(1, int(generator.expovariate(1 / 161.31))) for _ in range(4_000))
    outputs = tuple(max(1, int(generator.expovariate(1 / 337.99))) for _ in range(4_000))
    shares = utilisation(Lengths("made", "made", prompts, outputs), 16, 2048)
    assert shares.paging > 0.96
    assert shares.by_maximum < shares.by_power_of_two < shares.by_exact_length < shares.paging


@given(
    prompts=st.lists(st.integers(1, 5_000), min_size=1, max_size=5),
    block_size=st.sampled_from([1, 16, 64, 784]),
)
def test_paging_wastes_less_than_a_block_per_request(prompts: list[int], block_size: int) -> None:
    lengths = Lengths("made", "made", tuple(prompts), tuple(10 for _ in prompts))
    paging = utilisation(lengths, block_size, 8192).paging
    steps = 11 * len(prompts)
    written = sum(p + t for p in prompts for t in range(11))
    assert written / (written + steps * (block_size - 1)) - 1e-9 <= paging <= 1
