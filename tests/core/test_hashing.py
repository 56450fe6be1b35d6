import os
import subprocess
import sys

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvern.core.hashing import CacheKey, hash_spans, tagged_hash
from kvern.core.sequence import Media

SCRIPT = """
import numpy as np
from kvern.core.hashing import CacheKey, hash_spans
root = CacheKey(model="m", kv_format="bf16/16", cache_salt="s").root_hash(b"key")
print(root.hex(), hash_spans(root, np.arange(32, dtype=np.int32), 16, (), 0).hex())
"""
GOLDEN = (
    "1166a5596d583898a643d92cb8c89e4e "
    "cc8b6a1a9f818d630c628d2382321a66b096022ec2ed5e46c196574d5ef4a99f"
)


def run(seed: str) -> str:
    environment = {**os.environ, "PYTHONHASHSEED": seed}
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT], capture_output=True, text=True, env=environment, check=True
    )
    return done.stdout.strip()


def test_hashes_are_equal_in_every_process():
    assert run("0") == run("12345") == GOLDEN


texts = st.one_of(st.none(), st.text("ab:1", max_size=3))


@given(st.tuples(texts, texts, texts), st.tuples(texts, texts, texts))
def test_pfx_007_keys_of_different_kinds_never_meet(one, other):
    """Adapter, salt and regime are tagged: equal hashes mean equal triples."""

    def root(triple):
        adapter, salt, regime = triple
        return CacheKey(adapter=adapter, cache_salt=salt, position_regime=regime or "").root_hash(
            b""
        )

    def normal(triple):
        return (*triple[:2], triple[2] or "")

    assert (root(one) == root(other)) == (normal(one) == normal(other))


@given(
    st.lists(st.tuples(st.text("ab1:", max_size=3), texts), max_size=3),
    st.lists(st.tuples(st.text("ab1:", max_size=3), texts), max_size=3),
)
def test_tagged_hash_is_injective(one, other):
    assert (tagged_hash(one) == tagged_hash(other)) == (one == other)


def test_every_field_changes_the_hash():
    names = ["model", "numerics", "kv_format", "position_regime", "adapter", "cache_salt"]
    hashes = {CacheKey().root_hash(b""), CacheKey().root_hash(b"secret")}
    for name in names:
        hashes.add(CacheKey(**{name: "x"}).root_hash(b""))
    assert len(hashes) == len(names) + 2
    assert CacheKey().differences(CacheKey(adapter="x", cache_salt="y")) == (
        "adapter",
        "cache_salt",
    )


@pytest.mark.parametrize("span", [1, 4, 16])
def test_chain_continues_where_it_stopped(span):
    tokens = np.arange(span * 5, dtype=np.int32)
    root = b"r" * 16
    whole = hash_spans(root, tokens, span, (), 0)
    first = hash_spans(root, tokens[: 2 * span], span, (), 0)
    rest = hash_spans(first[-16:], tokens[2 * span :], span, (), 2 * span)
    assert whole == first + rest


def test_media_count_where_they_begin():
    tokens = np.full(12, 9, np.int32)
    root = b"r" * 16
    plain = hash_spans(root, tokens, 4, (), 0)
    one = hash_spans(root, tokens, 4, (Media(5, 4, b"x"),), 0)
    two = hash_spans(root, tokens, 4, (Media(5, 4, b"y"),), 0)
    moved = hash_spans(root, tokens, 4, (Media(6, 4, b"x"),), 0)
    assert plain[:16] == one[:16] == two[:16]
    assert len({plain[16:32], one[16:32], two[16:32], moved[16:32]}) == 4
    assert len({plain[32:], one[32:], two[32:], moved[32:]}) == 4
