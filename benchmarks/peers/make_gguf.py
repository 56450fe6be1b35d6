"""Write a GGUF file in another quantisation: ``make_gguf.py FILE.gguf OUT.gguf Q4_0``.

Runs in llama.cpp's environment and calls its own quantiser, as its command-line tool does, so that the
file is what its users have (a Q4_0 file keeps its embedding in Q6_K, for example).
"""

import sys

import llama_cpp

TYPES = {
    "Q4_0": "LLAMA_FTYPE_MOSTLY_Q4_0",
    "Q8_0": "LLAMA_FTYPE_MOSTLY_Q8_0",
    "F16": "LLAMA_FTYPE_MOSTLY_F16",
    "BF16": "LLAMA_FTYPE_MOSTLY_BF16",
}


def main(source: str, target: str, name: str) -> None:
    params = llama_cpp.llama_model_quantize_default_params()
    params.ftype = getattr(llama_cpp, TYPES[name])
    params.allow_requantize = True
    code = llama_cpp.llama_model_quantize(source.encode(), target.encode(), params)
    if code != 0:
        raise SystemExit(f"llama.cpp cannot write {target} as {name}: code {code}")


if __name__ == "__main__":
    main(*sys.argv[1:4])
