"""Write a peer's ``peer.json``: ``describe.py PEER FOLDER MODEL FILE``; called by ``setup.sh``.

Each variant is one engine in the results: a form of the model's file, and a KV format. Variants that
matter for some cases only say so, which keeps a whole comparison short.
"""

import json
import re
import sys
from pathlib import Path

ADAPTERS = Path(__file__).resolve().parent / "adapters"
MOST_CASES = ["a", "b", "c", "d"]
LONG_CASES = ["c", "sweep"]


def variants_of(peer: str, model: str, file: Path) -> list[dict]:
    found = re.search(r"(BF16|F16|F32|Q\d\w*)", file.stem, re.IGNORECASE)
    own = found[1].upper() if found else "file"
    folder = {"name": "bf16", "model": f"../models/{model}-bf16"}
    if peer == "llama.cpp":
        f16 = {"kv_format": "f16"}
        return [
            {"name": own, "model": str(file), "options": f16},
            *[
                {
                    "name": name,
                    "model": f"../models/{model}-{name}.gguf",
                    "options": f16,
                    "cases": MOST_CASES,
                }
                for name in ("Q4_0", "Q8_0")
            ],
            {
                "name": "BF16",
                "model": f"../models/{model}-BF16.gguf",
                "options": f16,
                "cases": ["a", "b"],
            },
            {
                "name": f"{own}, q8_0 KV",
                "model": str(file),
                "options": {"kv_format": "q8_0"},
                "cases": LONG_CASES,
            },
        ]
    if peer == "openvino":
        return [
            {"name": own, "model": str(file), "options": {"kv_format": "f16"}},
            {
                "name": f"{own}, u8 KV",
                "model": str(file),
                "options": {"kv_format": "u8"},
                "cases": LONG_CASES,
            },
        ]
    return [folder]


def main(peer: str, folder: Path, model: str, file: Path) -> None:
    adapter = {
        "llama.cpp": "llama_cpp_peer.py",
        "transformers": "transformers_peer.py",
        "openvino": "openvino_peer.py",
        "vllm": "vllm_peer.py",
    }[peer]
    described = {
        "name": peer,
        "python": "bin/python",
        "adapter": str(ADAPTERS / adapter),
        "made_from": model,
        "variants": variants_of(peer, model, file),
    }
    path = folder / peer / "peer.json"
    path.write_text(json.dumps(described, indent=2) + "\n")
    print(f"{peer}: {path}")


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), sys.argv[3], Path(sys.argv[4]))
