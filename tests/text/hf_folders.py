"""Small Hugging Face folders of the usual shapes."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.text.golden import golden
from tests.text.texts import TEXTS
from tokenizers import (
    AddedToken,
    Regex,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
    trainers,
)

from kvern.text.pretokenizers import pre_tokenizer

CHAT = (
    "{{ bos_token }}{% for message in messages %}<|{{ message['role'] }}|>\n"
    "{{ message['content'] | trim }}{{ eos_token }}\n{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>\n{% endif %}"
)
LINES = [line for text in TEXTS for line in text.splitlines() if line]


def byte_level() -> Tokenizer:
    """GPT-2's shape, with special tokens and one that is only added."""
    vocabulary = golden()["byte_level"]
    ids = {token: i for i, token in enumerate(vocabulary["tokens"])}
    merges = [tuple(merge.split(" ")) for merge in vocabulary["merges"]]
    tokenizer = Tokenizer(models.BPE(vocab=ids, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.post_processor = processors.ByteLevel(trim_offsets=False)
    tokenizer.add_special_tokens(["<|endoftext|>", "<|im_start|>", "<|im_end|>"])
    tokenizer.add_tokens([AddedToken("<think>", special=False, normalized=False)])
    return tokenizer


def llama3() -> Tokenizer:
    """Llama 3's shape: a split, words that are tokens, BOS from the post-processor."""
    tokenizer = byte_level()
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(pre_tokenizer("llama-bpe").patterns[0]), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.post_processor = processors.Sequence(
        [
            processors.ByteLevel(trim_offsets=False),
            processors.TemplateProcessing(
                single="<|im_start|> $A", special_tokens=[("<|im_start|>", 1)]
            ),
        ]
    )
    return tokenizer


def llama2() -> Tokenizer:
    """Llama 2's shape: SentencePiece BPE as ranked merges, with byte fallback."""
    specials = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    tokenizer.normalizer = normalizers.Sequence(
        [normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")]
    )
    trainer = trainers.BpeTrainer(
        vocab_size=700, special_tokens=specials, show_progress=False, limit_alphabet=120
    )
    tokenizer.train_from_iterator(LINES, trainer)
    # Only three of the tokens that the trainer took as special are so in such a file.
    description = json.loads(tokenizer.to_str())
    description["added_tokens"] = description["added_tokens"][:3]
    tokenizer = Tokenizer.from_str(json.dumps(description))
    tokenizer.decoder = decoders.Sequence(
        [
            decoders.Replace("\u2581", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", 1)]
    )
    return tokenizer


def unigram() -> Tokenizer:
    """T5's shape: unigram with a space mark, EOS from the post-processor."""
    tokenizer = Tokenizer(models.Unigram())
    tokenizer.normalizer = normalizers.NFKC()
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    trainer = trainers.UnigramTrainer(
        vocab_size=400,
        special_tokens=["<pad>", "</s>", "<unk>"],
        unk_token="<unk>",
        show_progress=False,
    )
    tokenizer.train_from_iterator(LINES, trainer)
    tokenizer.decoder = decoders.Metaspace()
    tokenizer.post_processor = processors.TemplateProcessing(
        single="$A </s>", special_tokens=[("</s>", 1)]
    )
    return tokenizer


SHAPES: dict[str, tuple[Callable[[], Tokenizer], dict[str, Any]]] = {
    "byte_level": (
        byte_level,
        {"bos_token": "<|im_start|>", "eos_token": "<|im_end|>", "unk_token": "<|endoftext|>"},
    ),
    "byte_level_add_bos": (
        byte_level,
        {"bos_token": "<|im_start|>", "eos_token": "<|im_end|>", "add_bos_token": True},
    ),
    "byte_level_add_both": (
        byte_level,
        {
            "bos_token": {"__type": "AddedToken", "content": "<|im_start|>", "special": True},
            "eos_token": "<|im_end|>",
            "add_bos_token": True,
            "add_eos_token": True,
        },
    ),
    "byte_level_more_tokens": (
        byte_level,
        {
            "eos_token": "<|im_end|>",
            "pad_token": "<|pad|>",
            "additional_special_tokens": ["<|extra|>"],
            "added_tokens_decoder": {
                "2500": {"content": "<think>", "special": False, "normalized": False},
                "2501": {"content": "<tool>", "special": False, "normalized": False},
            },
        },
    ),
    "llama3": (llama3, {"bos_token": "<|im_start|>", "eos_token": "<|im_end|>"}),
    "llama3_no_bos": (
        llama3,
        {"bos_token": "<|im_start|>", "eos_token": "<|im_end|>", "add_bos_token": False},
    ),
    "llama2": (llama2, {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}),
    "unigram": (unigram, {"eos_token": "</s>", "unk_token": "<unk>", "pad_token": "<pad>"}),
}


def write_folder(folder: Path, shape: str, **extra: Any) -> Path:
    """Writes a folder of the named shape."""
    make, config = SHAPES[shape]
    folder.mkdir(parents=True, exist_ok=True)
    make().save(str(folder / "tokenizer.json"))
    full = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "chat_template": CHAT,
        "clean_up_tokenization_spaces": False,
        **config,
        **extra,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(full), encoding="utf-8")
    return folder
