"""Write a GGUF file as a Hugging Face folder in bfloat16: ``make_bf16.py FILE.gguf FOLDER``.

Runs in an environment with transformers, torch, gguf and accelerate. The weights are the file's own,
decoded; rounding them to bfloat16 is the only change.
"""

import sys
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig


def main(file: Path, folder: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(
        file.parent,
        gguf_file=file.name,
        dtype=torch.bfloat16,
        quantization_config=GgufConfig(dequantize=True),
    )
    _forget_the_quantisation(model)
    model.save_pretrained(folder)
    AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name).save_pretrained(folder)


def _forget_the_quantisation(model: torch.nn.Module) -> None:
    """The weights are plain now; what says otherwise would keep the folder from being written."""
    model.hf_quantizer = None
    for owner, name in ((model, "quantization_method"), (model.config, "quantization_config")):
        if hasattr(owner, name):
            delattr(owner, name)


if __name__ == "__main__":
    main(Path(sys.argv[1]).resolve(), Path(sys.argv[2]))
