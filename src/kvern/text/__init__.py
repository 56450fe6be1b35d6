"""Text and tokens: tokenizers, chat templates, text one token at a time, stop strings."""

from kvern.text.detokenizer import Detokenizer
from kvern.text.stops import StopStrings
from kvern.text.tokenizer import Tokenizer

__all__ = ["Detokenizer", "StopStrings", "Tokenizer"]
