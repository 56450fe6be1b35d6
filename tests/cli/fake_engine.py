"""An engine that answers at once from a script, with a tokenizer of one id per character."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from types import SimpleNamespace
from typing import Any

from kvern.core.miss import MissReason, MissReport

END = "\x03"


def _miss(ids: list[int], cached: int) -> MissReport:
    if not cached:
        reason = MissReason("never_stored", 0)
    else:
        reason = MissReason("text_differs", cached, stored_token=101, prompt_token=ids[cached])
    return MissReport(len(ids), cached, ((0, cached),), (reason,))


class FakeTokenizer:
    """Ids are code points; the template puts each message into angle brackets."""

    def __init__(self, chat_template: str | None = "template") -> None:
        self.chat_template = chat_template

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        return [ord(char) for char in text]

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        text = "".join(map(chr, ids))
        return text.replace(END, "") if skip_special_tokens else text

    def token_text(self, token_id: int) -> str:
        return chr(token_id)

    def render_chat(
        self, messages: list[dict[str, Any]], add_generation_prompt: bool = True
    ) -> str:
        text = "".join(f"<{m['role'][0]}>{m['content']}{END}" for m in messages)
        return text + ("<a>" if add_generation_prompt else "")

    def apply_chat_template(
        self, messages: list[dict[str, Any]], add_generation_prompt: bool = True
    ) -> list[int]:
        return self.encode(self.render_chat(messages, add_generation_prompt))


class FakeLLM:
    """Answers each request with the next text of `answers`; remembers what it saw."""

    answers: Sequence[str] = ("Hello there.",)
    chat_template: str | None = "template"
    made: FakeLLM

    def __init__(self, model: str, **options: Any) -> None:
        type(self).made = self
        self.path, self.options = model, options
        self.tokenizer = FakeTokenizer(self.chat_template)
        self.settings = SimpleNamespace(no_cache=options.get("no_cache", False))
        self.work = SimpleNamespace(tokens_processed=0, query_key_products=0)
        self.kv_info = {
            "format": options.get("kv_format", "bf16"),
            "block_size": 16,
            "bytes_per_token": 23_040,
            "blocks_total": 729,
            "blocks_used": 3,
            "bytes_total": 729 * 368_640,
            "bytes_used": 3 * 368_640,
        }
        self.prompts: list[str | list[int]] = []
        self.params: Any = None
        self.seen: list[int] = []
        self.num_closed_streams = 0
        self._answers = iter(self.answers)

    def __enter__(self) -> FakeLLM:
        return self

    def __exit__(self, *_: object) -> None:
        return

    def stream(self, prompt: str | list[int], params: Any) -> Iterator[Any]:
        self.prompts.append(prompt)
        self.params = params
        ids = self.tokenizer.encode(prompt) if isinstance(prompt, str) else prompt
        cached = 0
        while cached < min(len(self.seen), len(ids) - 1) and self.seen[cached] == ids[cached]:
            cached += 1
        text = next(self._answers)
        answer = self.tokenizer.encode(text + END)
        self.work.tokens_processed += len(ids) - cached + len(answer) - 1
        self.seen = ids + answer
        try:
            for char in text:
                yield SimpleNamespace(text=char, token_ids=(ord(char),), output=None)
            output = self._output(ids, answer, text, cached)
            yield SimpleNamespace(text="", token_ids=(ord(END),), output=output)
        finally:
            self.num_closed_streams += 1

    @staticmethod
    def _output(ids: list[int], answer: list[int], text: str, cached: int) -> Any:
        return SimpleNamespace(
            text=text,
            token_ids=tuple(answer),
            prompt_token_ids=tuple(ids),
            num_completion_tokens=len(answer),
            cached_tokens=cached,
            finish_reason="stop",
            timing=SimpleNamespace(queue_s=0.0, ttft_s=0.05, tpot_s=0.01, e2e_s=0.17),
            seed=7,
            miss=_miss(ids, cached),
            error=None,
        )
