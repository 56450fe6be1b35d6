r"""How text is cut into words before byte-level BPE merges, for every kind a GGUF file can name.

`tokenizer.ggml.pre` names the kind. Each kind is a sequence of regular expressions: every one cuts
the pieces that the ones before it left; matches and the gaps between them both become pieces, and
a piece is matched as if nothing stood around it. The expressions are those of llama.cpp (build
11739), written for the Oniguruma engine of the `tokenizers` library. Where llama.cpp's own engine
reads an expression differently, the expression here says what llama.cpp does:

- its GPT-2 expression always has a final ``|\s+``;
- classes of letter case (``\p{Lu}``, ``\p{Ll}``) see only ASCII case, other letters are both;
- ``kimi-k2``, ``afmoe`` and ``tiny_aya`` are functions there, expressed here.

A handful of characters that Unicode 16 added may be cut differently: Oniguruma's tables are older.
"""

from __future__ import annotations

from dataclasses import dataclass
from types import MappingProxyType
from typing import Final

from kvern.errors import UnsupportedModelError

_CONTRACTION: Final = r"'s|'t|'re|'ve|'m|'ll|'d"
_ANY_CASE_CONTRACTION: Final = r"(?:'[sS]|'[tT]|'[rR][eE]|'[vV][eE]|'[mM]|'[lL][lL]|'[dD])"
_SPACES: Final = r"\s*[\r\n]+|\s+(?!\S)|\s+"
_NEWLINE_RUNS: Final = r"[^\n]+|\n+"
_PUNCTUATED_WORD: Final = r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+"
_CJK_KANA: Final = "[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+"
_CJK_WIDE: Final = "[[\u4e00-\u9fa5\u0800-\u4e00\uac00-\ud7ff]&&[^\\s]]+"
_HAN: Final = (
    "\u4e00-\u9fff\u3400-\u4dbf\U00020000-\U0002a6df\U0002a700-\U0002b73f"
    "\U0002b740-\U0002b81f\U0002b820-\U0002ceaf\U0002ceb0-\U0002ebef\uf900-\ufaff"
    "\U0002f800-\U0002fa1f"
)
# Letters that have case, as the reference tokenizer of DeepSeek LLM lists them.
_CASED: Final = (
    "A-Za-z\u00b5\u00c0-\u00d6\u00d8-\u00f6\u00f8-\u01ba\u01bc-\u01bf\u01c4-\u0293\u0295-\u02af"
    "\u0370-\u0373\u0376\u0377\u037b-\u037d\u037f\u0386\u0388-\u038a\u038c\u038e-\u03a1"
    "\u03a3-\u03f5\u03f7-\u0481\u048a-\u052f\u0531-\u0556\u10a0-\u10c5\u13a0-\u13f5"
    "\u13f8-\u13fd\u1c90-\u1cba\u1cbd-\u1cbf\u1d00-\u1d2b\u1d6b-\u1d77\u1d79-\u1d9a"
    "\u1e00-\u1f15\u1f18-\u1f1d\u1f20-\u1f45\u1f48-\u1f4d\u1f50-\u1f57\u1f59\u1f5b\u1f5d"
    "\u1f5f-\u1f7d\u1f80-\u1fb4\u1fb6-\u1fbc\u1fbe\u1fc2-\u1fc4\u1fc6-\u1fcc\u1fd0-\u1fd3"
    "\u1fd6-\u1fdb\u1fe0-\u1fec\u1ff2-\u1ff4\u1ff6-\u1ffc\u2102\u2107\u210a-\u2113\u2115"
    "\u2119-\u211d\u2124\u2126\u2128\u212a-\u212d\u212f-\u2134\u2139\u213c-\u213f"
    "\u2145-\u2149\u214e\u2183\u2184\u2c00-\u2c7b\u2c7e-\u2ce4\u2ceb-\u2cee\u2cf2\u2cf3"
    "\ua640-\ua66d\ua680-\ua69b\ua722-\ua76f\ua771-\ua787\ua78b-\ua78e\uab70-\uabbf"
    "\ufb00-\ufb06\ufb13-\ufb17\uff21-\uff3a\uff41-\uff5a\U00010400-\U0001044f"
    "\U000104b0-\U000104d3\U000104d8-\U000104fb\U00010c80-\U00010cb2\U00010cc0-\U00010cf2"
    "\U000118a0-\U000118df\U0001e900-\U0001e943"
)


def _words(numbers: str, *, letters: str = r"\p{L}+", symbols: str = r"[^\s\p{L}\p{N}]") -> str:
    """The expression of Llama 3 and its relatives; `numbers` is how many digits stay together."""
    return (
        rf"{_ANY_CASE_CONTRACTION}|[^\r\n\p{{L}}\p{{N}}]?{letters}|{numbers}"
        rf"| ?{symbols}+[\r\n]*|{_SPACES}"
    )


def _cased_words(upper: str, lower: str, numbers: str, suffix: str) -> str:
    """The expression of GPT-4o and its relatives: a word is capitals and then small letters."""
    start = r"[^\r\n\p{L}\p{N}]?"
    return (
        rf"{start}{upper}*{lower}+{suffix}|{start}{upper}+{lower}*{suffix}|{numbers}"
        rf"| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{_SPACES}"
    )


_GPT2: Final = rf"{_CONTRACTION}| ?\p{{L}}+| ?\p{{N}}+| ?[^\s\p{{L}}\p{{N}}]+|\s+(?!\S)|\s+"
_LLAMA3: Final = _words(r"\p{N}{1,3}")
_QWEN2: Final = _words(r"\p{N}")
_DEEPSEEK_WORDS: Final = (
    rf"{_PUNCTUATED_WORD}|[^\r\n\p{{L}}\p{{P}}\p{{S}}]?[\p{{L}}\p{{M}}]+"
    rf"| ?[\p{{P}}\p{{S}}]+[\r\n]*|{_SPACES}"
)
_BLOOM: Final = " ?[^(\\s|.,!?\u2026\u3002\uff0c\u3001\u0964\u06d4\u060c)]+"
# Runs of digits are grouped in threes from their end. A match is the text before a run with the
# run's first group, or one of its other groups: behind a digit always three, so nothing is counted
# twice.
_DIGITS_FROM_THE_RIGHT: Final = (
    r"(?<=\p{N})\p{N}{3}|[^\p{N}]*+(?:\p{N}{1,3}(?=(?:\p{N}{3})*+(?!\p{N}))|\z)"
)
# The same for ASCII digits, and a group of three never takes the text before it.
_ASCII_DIGITS_FROM_THE_RIGHT: Final = (
    r"(?<=[0-9])[0-9]{3}|[^0-9]*+[0-9]{1,2}(?=(?:[0-9]{3})*+(?![0-9]))|[^0-9]++|[0-9]{3}"
)
_NOT_SMALL: Final = r"[\p{L}&&[^a-z]]"
_NOT_CAPITAL: Final = r"[\p{L}&&[^A-Z]]"
_NOT_SMALL_OR_MARK: Final = r"[[\p{L}\p{M}]&&[^a-z]]"
_NOT_CAPITAL_OR_MARK: Final = r"[[\p{L}\p{M}]&&[^A-Z]]"
_LETTERS_AND_MARKS: Final = r"[\p{L}\p{M}]"

_GPT2_KIND: Final = (_GPT2,)
_SINGLE_DIGITS_KIND: Final = (r"\p{N}", _GPT2)
_LLAMA3_KIND: Final = (_LLAMA3,)
_QWEN2_KIND: Final = (_QWEN2,)
_DEEPSEEK3_KIND: Final = (r"\p{N}{1,3}", _CJK_KANA, _DEEPSEEK_WORDS)
_GPT4O_KIND: Final = (
    _cased_words(_NOT_SMALL, _NOT_CAPITAL, r"\p{N}{1,3}", f"{_ANY_CASE_CONTRACTION}?"),
)
_TINY_AYA_KIND: Final = (
    _DIGITS_FROM_THE_RIGHT,
    _cased_words(
        _LETTERS_AND_MARKS, _LETTERS_AND_MARKS, r"\p{N}{1,3}", f"{_ANY_CASE_CONTRACTION}?"
    ),
)
_BAILING_KIND: Final = (
    r"'(?:[sSdDmMtT]|[lL][lL]|[vV][eE]|[rR][eE])|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]|\s+(?!\S)|\s+",
)


@dataclass(frozen=True, slots=True)
class PreTokenizer:
    """One kind of pre-tokenizer.

    Attributes:
        patterns: expressions applied one after the other, matches and gaps both kept.
        ignore_merges: a word that is a token as a whole is not assembled from merges.
        add_bos: whether BOS is added where the file does not say.
        byte_level: bytes are written as GPT-2's printable characters; otherwise tokens hold plain
            text with U+2581 for a space, and missing characters become byte tokens.
    """

    patterns: tuple[str, ...]
    ignore_merges: bool = False
    add_bos: bool = False
    byte_level: bool = True


_KINDS: Final = (
    ("default", PreTokenizer((r"[\p{P}\$\+<=>\^~\|]+", _GPT2, r"\p{N}+", r"[0-9][0-9][0-9]"))),
    (
        "gpt-2 phi-2 mpt olmo jais trillion granite-docling exaone4 mellum modern-bert gigachat"
        " a.x-4.0 jina-es jina-de jina-v2-es jina-v2-de jina-v1-en jina-v2-code roberta-bpe",
        PreTokenizer(
            _GPT2_KIND,
        ),
    ),
    (
        "smollm starcoder refact command-r codeshell exaone minerva-7b mellum2",
        PreTokenizer(
            _SINGLE_DIGITS_KIND,
        ),
    ),
    ("falcon", PreTokenizer((r"[\p{P}\$\+<=>\^~\|`]+", _GPT2, r"[0-9][0-9][0-9]"))),
    (
        "llama3 llama-v3 llama-bpe falcon3 falcon-h1 pixtral midm-2.0 lfm2 jina-v5-nano",
        PreTokenizer(
            _LLAMA3_KIND,
            ignore_merges=True,
            add_bos=True,
        ),
    ),
    ("dbrx smaug-bpe chatglm-bpe", PreTokenizer(_LLAMA3_KIND)),
    ("glm4 glm5", PreTokenizer(_LLAMA3_KIND, ignore_merges=True)),
    (
        "qwen2 stablelm2 hunyuan solar-open megrez deepseek-r1-qwen kormo f2llmv2 grok-2",
        PreTokenizer(
            _QWEN2_KIND,
        ),
    ),
    (
        "qwen35",
        PreTokenizer(
            (_words(r"\p{N}", letters=r"[\p{L}\p{M}]+", symbols=r"[^\s\p{L}\p{M}\p{N}]"),),
        ),
    ),
    ("laguna", PreTokenizer((_NEWLINE_RUNS, _QWEN2))),
    ("minicpm5", PreTokenizer((r"\p{N}{1,3}", _words(r"\p{N}+")), ignore_merges=True)),
    (
        "seed-coder",
        PreTokenizer(
            (
                rf"{_ANY_CASE_CONTRACTION}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}"
                rf"| ?[^\s\p{{L}}\p{{N}}\r\n]+|{_SPACES}",
            ),
        ),
    ),
    (
        "ufakzeka",
        PreTokenizer(
            (rf"[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|{_SPACES}",),
        ),
    ),
    (
        "exaone-moe",
        PreTokenizer(
            (
                rf"{_ANY_CASE_CONTRACTION}"
                r"|[^\r\n\p{L}\p{N}]?(?:\p{L}\p{M}*(?: \p{L}\p{M}*)*)+|\p{N}"
                r"| ?[^\s\p{L}\p{N}]+[\r\n/]?|\s*[\r\n]|\s+(?!\S)|\s+",
            ),
        ),
    ),
    (
        "jais-2",
        PreTokenizer(
            (
                rf"{_ANY_CASE_CONTRACTION}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{{1,3}}"
                r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|"
                + "|".join(rf"\s{{{2**power}}}(?!\S)" for power in range(9, 1, -1))
                + r"|\s{1,2}(?!\S)|\s{1}",
            ),
        ),
    ),
    ("bailingmoe bailingmoe2 llada-moe", PreTokenizer(_BAILING_KIND)),
    ("deepseek-v3 hunyuan-dense joyai-llm hy_v4", PreTokenizer(_DEEPSEEK3_KIND)),
    (
        "spark2_5",
        PreTokenizer(
            (
                r"\p{N}{1,3}",
                _CJK_KANA,
                rf"{_PUNCTUATED_WORD}|[^\r\n\p{{L}}\p{{P}}\p{{S}}]?[\p{{L}}\p{{M}}]+"
                r"| ?[\p{P}\p{S}]+|[\r\n]|\s+(?!\S)|\s+",
                r"\p{N}",
            ),
        ),
    ),
    (
        "deepseek-llm",
        PreTokenizer(
            (
                r"[\r\n]",
                rf"\s?[{_CASED}]+",
                "\\s?[!-/:-~\uff01-\uff0f\uff1a-\uff5e\u2018-\u201f\u3001\u3002]+",
                r"\s+\z",
                _CJK_WIDE,
                r"\p{N}+",
            ),
        ),
    ),
    ("deepseek-coder", PreTokenizer((r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", _CJK_WIDE, r"\p{N}"))),
    (
        "youtu",
        PreTokenizer(
            (
                "[\uac00-\ud7a3\u3131-\u318e]+|[\uff01\u2026\u201c\u201d\u2018\u2019\u2014\uff1a\uff1b"
                "\uff0c\u3001-\u303f\ufe30-\ufe4f]+|[\u3105-\u312f]+|" + _CJK_KANA,
                _cased_words(
                    _LETTERS_AND_MARKS, _LETTERS_AND_MARKS, r"\p{N}", f"{_ANY_CASE_CONTRACTION}?"
                ),
            ),
            ignore_merges=True,
        ),
    ),
    ("poro-chat bloom gpt3-finnish", PreTokenizer((_BLOOM,))),
    ("viking", PreTokenizer((_BLOOM, r"\p{N}"))),
    (
        "tekken",
        PreTokenizer(
            (_cased_words(_NOT_SMALL, _NOT_CAPITAL, r"\p{N}", ""),),
            ignore_merges=True,
            add_bos=True,
        ),
    ),
    ("gpt-4o llama4 kanana2 talkie minimax-m2", PreTokenizer(_GPT4O_KIND)),
    (
        "granite-embed-multi-97m",
        PreTokenizer(
            (
                _cased_words(
                    _NOT_SMALL_OR_MARK,
                    _NOT_CAPITAL_OR_MARK,
                    r"\p{N}{1,3}",
                    f"{_ANY_CASE_CONTRACTION}?",
                ),
            ),
            ignore_merges=True,
        ),
    ),
    ("tiny_aya cohere2moe", PreTokenizer(_TINY_AYA_KIND)),
    (
        "kimi-k2",
        PreTokenizer(
            (
                rf"[{_HAN}]+|[^\r\n\p{{L}}\p{{N}}]?[\p{{L}}&&[^{_HAN}]]+{_ANY_CASE_CONTRACTION}?"
                rf"|\p{{N}}{{1,3}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|{_SPACES}",
            ),
        ),
    ),
    ("superbpe", PreTokenizer((r"\p{N}+", _ASCII_DIGITS_FROM_THE_RIGHT))),
    (
        "afmoe",
        PreTokenizer(
            (
                _DIGITS_FROM_THE_RIGHT,
                "[\u4e00-\u9fff\u3400-\u4dbf\u8c48-\ud7ff\ue000-\ufaff\u3040-\u309f\u30a0-\u30ff\uff65-\uff9f"
                "\u2f00-\u2fdf\u0e40-\u0e7f\u0e80-\u0eff\u1780-\u17ff\u1000-\u109f\uaa60-\uaa7f"
                "\ua9e0-\ua9ff\uac00-\ud7af\u1100-\u11ff]+",
                _DEEPSEEK_WORDS,
            ),
        ),
    ),
    (
        "chameleon",
        PreTokenizer(
            (
                r"<sentinel:[0-9]+>",
                r"(?:IMGIMG)(?:[A-I]{1,4})Z",
                r"[\t\n]|    |  ",
                r"\p{N}",
                r"[\p{P}!-/:-@\[-`{-~]",
                _GPT2,
            ),
            add_bos=True,
        ),
    ),
    (
        "gemma4 granite-embed-multi-311m",
        PreTokenizer((_NEWLINE_RUNS,), add_bos=True, byte_level=False),
    ),
    ("sarvam-moe", PreTokenizer((_NEWLINE_RUNS,), byte_level=False)),
)

PRE_TOKENIZERS: Final = MappingProxyType(
    {name: kind for names, kind in _KINDS for name in names.split()}
)
"""Every kind that `tokenizer.ggml.pre` may name, by name."""


def pre_tokenizer(kind: str) -> PreTokenizer:
    """The pre-tokenizer of the named kind.

    Raises:
        UnsupportedModelError: the kind is unknown; another one would give other token ids.
    """
    try:
        return PRE_TOKENIZERS[kind]
    except KeyError:
        known = ", ".join(sorted(PRE_TOKENIZERS))
        raise UnsupportedModelError(
            f"the file's pre-tokenizer {kind!r} (tokenizer.ggml.pre) is unknown, and another one "
            f"would give wrong token ids: known are {known}"
        ) from None
