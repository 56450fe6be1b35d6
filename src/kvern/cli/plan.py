"""`kvern plan MODEL`: what fits in memory, exactly, before anything is allocated."""

from __future__ import annotations

import argparse
import importlib
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvern.cli.output import print_json
from kvern.errors import UsageError
from kvern.plan import Plan, PlanRequest, find_device, load_devices, plan
from kvern.plan.advice import batch_warnings
from kvern.plan.engines import split_engine
from kvern.plan.request import parse_extra_cache
from kvern.plan.sources import file_weights
from kvern.spec.budget import format_size, parse_size

if TYPE_CHECKING:
    from kvern.plan.lengths import Concurrency, Lengths, Utilisation
    from kvern.plan.roofline import DecodeBound

EPILOG = """examples:
  kvern plan config.json --device h100-sxm --context 16384
  kvern plan config.json --device h100-sxm --tp 4 --engine vllm@0.19 --kv-format fp8
  kvern plan config.json --need 32x16384                 the smallest set-up that serves that
  kvern plan config.json --kv-memory 20GiB --lengths trace.jsonl
  kvern plan config.json --device l4 --explain --html report.html
"""


def add_parser(subparsers: Any) -> None:
    """Adds the command's parser."""
    parser = subparsers.add_parser(
        "plan",
        help="work out what fits in memory, before anything is allocated",
        description="Works out what fits: per rank, in both directions, by the rules of kvern or "
        "of another engine and version. MODEL is a catalogue name, a config.json, a folder or a "
        "GGUF file; only headers are read.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    # so that "--memory -3GiB" is a size to refuse with its number, not an unknown flag
    parser._negative_number_matcher = re.compile(r"^-\d+(\.\d+)?[A-Za-z]*$")
    parser.add_argument("model", metavar="MODEL", nargs="?", help="what to plan for")
    _add_memory_flags(parser.add_argument_group("memory"))
    _add_request_flags(parser.add_argument_group("requests and cache"))
    _add_parallel_flags(parser.add_argument_group("parallelism"))
    _add_engine_flags(parser.add_argument_group("engines"))
    _add_answer_flags(parser.add_argument_group("answers"))


def _add_memory_flags(group: Any) -> None:
    group.add_argument("--device", metavar="NAME", help="a device of the catalogue")
    group.add_argument("--list-devices", action="store_true", help="list the catalogue")
    group.add_argument("--memory", metavar="SIZE", help="memory of one device, e.g. 79.18GiB")
    group.add_argument("--kv-memory", metavar="SIZE", help="bytes for KV on each rank, no budget")
    group.add_argument("--weights", metavar="SIZE", help="weights of the whole model")
    group.add_argument("--weights-format", metavar="F", help="bf16, fp8, int4, ... by parameters")
    group.add_argument("--utilization", metavar="SHARE", type=float, help="share of memory to use")
    group.add_argument("--reserve", metavar="SIZE", help="activations and runtime of a rank")


def _add_request_flags(group: Any) -> None:
    group.add_argument("--context", metavar="N", type=int, help="tokens of one request, output too")
    group.add_argument("--kv-format", metavar="F", help="bf16, fp8, int8, kivi2, q8_0, ...")
    group.add_argument("--block-size", metavar="N", type=int, help="tokens of a block")
    group.add_argument(
        "--max-batched-tokens", metavar="N", type=int, help="tokens of a step at most"
    )
    group.add_argument("--max-num-seqs", metavar="N", type=int, help="requests that run at once")
    group.add_argument("--shared-prefix", metavar="N", type=int, help="tokens all requests share")
    group.add_argument("--retained-prefixes", metavar="CxN", help="idle prefixes, e.g. 200x1500")
    group.add_argument("--lengths", metavar="FILE", help="a trace, CSV or JSONL of lengths")
    group.add_argument("--seed", metavar="N", type=int, help="of the simulation over --lengths")
    group.add_argument("--need", metavar="NxL", help="the smallest set-up for N requests of L")


def _add_parallel_flags(group: Any) -> None:
    group.add_argument("--devices", metavar="N", type=int, help="devices there are (checked)")
    group.add_argument("--tp", metavar="N", type=int, default=1, help="tensor parallel degree")
    group.add_argument("--pp", metavar="N", type=int, default=1, help="pipeline stages")
    group.add_argument("--dp", metavar="N", type=int, default=1, help="replicas")
    group.add_argument("--dcp", metavar="N", type=int, default=1, help="decode context parallel")
    group.add_argument("--pp-layers", metavar="A,B", help="layers of each stage")


def _add_engine_flags(group: Any) -> None:
    group.add_argument(
        "--engine", metavar="E", default="kvern", help="kvern, vllm, sglang or llama.cpp, @VERSION"
    )
    group.add_argument("--num-blocks", metavar="N", type=int, help="blocks, instead of memory")
    group.add_argument("--max-total-tokens", metavar="N", type=int, help="SGLang's token slots")
    group.add_argument("--slots", metavar="N", type=int, help="sequences with own state or stream")
    group.add_argument("--speculative-tokens", metavar="N", type=int, default=0,
                       help="draft tokens per step; counts the model's MTP layers")  # fmt: skip
    group.add_argument("--ubatch", metavar="N", type=int, help="llama.cpp's micro-batch")
    group.add_argument("--unified", action=argparse.BooleanOptionalAction, default=None,
                       help="llama.cpp: one stream for all sequences")  # fmt: skip
    group.add_argument("--extra-cache", metavar="C", action="append", default=[],
                       help="a drafter or hidden states: sliding:layers=5,heads=8,dim=128,"
                       "window=2048 or hidden:bytes=10240")  # fmt: skip
    group.add_argument("--extra-blocks-per-request", metavar="N", type=int, default=0,
                       help="blocks a request holds beyond the groups modelled")  # fmt: skip
    group.add_argument("--state-mode", "--mamba-cache-mode", metavar="M", dest="state_mode",
                       help="recurrent states in vLLM: none, align or all")  # fmt: skip
    group.add_argument("--state-dtype", metavar="D", help="dtype of recurrent states")
    group.add_argument("--window-ratio", metavar="SHARE", type=float,
                       help="SGLang's window pool to its full pool")  # fmt: skip
    group.add_argument("--hybrid", action=argparse.BooleanOptionalAction, default=None,
                       help="vLLM's hybrid cache manager")  # fmt: skip
    group.add_argument("--disable-hybrid-kv-cache-manager", action="store_false", dest="hybrid",
                       default=argparse.SUPPRESS, help=argparse.SUPPRESS)  # fmt: skip
    group.add_argument("--attention-backend", metavar="B", help="SGLang: trtllm stores 576 B")
    group.add_argument("--mla", metavar="M", help="llama.cpp: heads, latent or latent+values")
    group.add_argument("--swap-space", metavar="SIZE", help="vLLM V0: swap of a rank (4GiB)")


def _add_answer_flags(group: Any) -> None:
    group.add_argument("--explain", action="store_true", help="show the formula, step by step")
    group.add_argument("--bound", action="store_true", help="time bounds of decode and prefill")
    group.add_argument(
        "--batch", metavar="N", type=int, help="requests in a step, for --bound and --explain"
    )
    group.add_argument("--ssd-bandwidth", metavar="SIZE", help="bytes per second, e.g. 7GB")
    group.add_argument("--html", metavar="FILE", help="write a report with plots")
    group.add_argument("--json", action="store_true", help="print one JSON object on stdout")


def run(args: argparse.Namespace) -> int:
    """Answers, in both directions."""
    if args.list_devices:
        return _list_devices(args)
    if args.model is None:
        raise UsageError("kvern plan: MODEL is missing: a catalogue name, config.json or GGUF file")
    request = _request(args)
    if args.need:
        return _need(args, request)
    answer = plan(request)
    about_batch = batch_warnings(answer, args.batch) if args.batch else ()
    answer = answer.with_warnings((*answer.warnings, *about_batch, *_unit_warnings(args)))
    document = answer.to_json()
    text = [] if args.json else _render("summary", answer)
    extras = _extras(args, answer, document, text)
    if not args.json:
        if args.explain:
            text += _render("explanation", answer, args.batch)
        text += _render("notes", "Warnings", answer.warnings)
        text += _render("notes", "Assumptions", answer.assumptions)
    else:
        document["explanation"] = _all_steps(answer)
        document["kv_matrix"] = _matrix(answer, args.batch)
    if args.html:
        html = importlib.import_module("kvern.plan.report").html_report(answer, *extras)
        Path(args.html).write_text(html, encoding="utf-8")
        document["html"] = args.html
        text += ["", f"Report: {args.html}"]
    if args.json:
        print_json(document)
    else:
        print("\n".join(text))
    return 0


def _render(function: str, *arguments: Any) -> list[str]:
    lines: list[str] = getattr(importlib.import_module("kvern.plan.render"), function)(*arguments)
    return lines


def _all_steps(answer: Plan) -> list[str]:
    explain = importlib.import_module("kvern.plan.explain")
    return [str(step) for step in explain.explained(answer)]


def _matrix(answer: Plan, batch: int | None) -> Any:
    explain = importlib.import_module("kvern.plan.explain")
    return explain.matrix_for(explain.formatted_model(answer), answer.context, batch)


def _request(args: argparse.Namespace) -> PlanRequest:
    model, weights = _load_model(args.model)
    engine, version = split_engine(args.engine)
    device = find_device(args.device) if args.device else None
    stages = None
    if args.pp_layers:
        stages = tuple(_whole(part, "--pp-layers") for part in args.pp_layers.split(","))
    given = _size(args.weights)
    from_file = weights if given is None and args.weights_format is None else None
    request = PlanRequest(
        model=model,
        engine=engine,
        engine_version=version,
        device=device,
        memory=_size(args.memory),
        tp=args.tp,
        pp=args.pp,
        dp=args.dp,
        dcp=args.dcp,
        pp_layers=stages,
        context=args.context,
        max_batched_tokens=args.max_batched_tokens,
        max_num_seqs=args.max_num_seqs,
        block_size=args.block_size,
        kv_format=args.kv_format,
        weights_format=args.weights_format,
        weights_bytes=from_file[0] if from_file else given,
        weights_basis=from_file[1] if from_file else "given",
        utilization=args.utilization,
        reserve=_size(args.reserve, zero=True),
        kv_memory=_size(args.kv_memory),
        num_blocks=args.num_blocks,
        num_tokens=args.max_total_tokens,
        slots=args.slots,
        speculative_tokens=args.speculative_tokens,
        extra_caches=tuple(map(parse_extra_cache, args.extra_cache)),
        extra_blocks_per_request=args.extra_blocks_per_request,
        ubatch=args.ubatch,
        unified=args.unified,
        state_mode=args.state_mode,
        state_dtype=args.state_dtype,
        window_ratio=args.window_ratio,
        hybrid=args.hybrid,
        backend=args.attention_backend,
        mla=args.mla,
    )
    if args.swap_space:
        request = replace(request, swap_space=parse_size(args.swap_space))
    needed = request.num_ranks * request.dp
    if args.devices is not None and args.devices != needed:
        raise UsageError(
            f"--devices {args.devices} and tp {args.tp} × pp {args.pp} × dp {args.dp} = {needed} "
            "do not agree: change one of them"
        )
    return request


def _load_model(text: str) -> tuple[Any, tuple[int, str] | None]:
    from kvern.catalog import CATALOG, model_path, resolve
    from kvern.spec.configs import load_model_spec

    entry = CATALOG.get(text)
    path = model_path(entry) if entry is not None else None
    if path is None or not path.is_file():
        path = resolve(text, allow_fetch=False)
    return load_model_spec(path, None if entry is None else entry.name), file_weights(path)


def _unit_warnings(args: argparse.Namespace) -> list[str]:
    """What sizes in GB are in GiB, in which drivers and engines count."""
    found: list[str] = []
    for flag in ("memory", "kv_memory", "weights", "reserve"):
        text = getattr(args, flag)
        if text is not None and text.strip().lower().endswith("gb"):
            name = "--" + flag.replace("_", "-")
            size = format_size(parse_size(text))
            found.append(f"{name} {text} is {size}: GB is 10^9 bytes, GiB is 2^30")
    return found


def _size(text: str | None, *, zero: bool = False) -> int | None:
    if text is None:
        return None
    if zero and text.strip() in ("0", "0B"):
        return 0
    return parse_size(text)


def _whole(text: str, flag: str) -> int:
    if not text.strip().isdigit():
        raise UsageError(f"{text!r} in {flag} is not a whole number")
    return int(text)


def _need(args: argparse.Namespace, request: PlanRequest) -> int:
    need = importlib.import_module("kvern.plan.need")
    options = need.options_for(request, args.need)
    if args.json:
        rows = [
            {
                "device": option.device.id,
                "tp": option.tp,
                "kv_format": option.kv_format,
                "total_memory_bytes": option.total_memory,
                "max_concurrency": option.concurrency,
                "max_model_len": option.plan.max_model_len,
            }
            for option in options
        ]
        best = options[0].plan.to_json() if options else None
        print_json({"need": args.need, "fits": bool(options), "options": rows, "plan": best})
    else:
        print("\n".join(_render("option_lines", options, args.need)))
        if options:
            print("\n" + "\n".join(_render("summary", options[0].plan)))
    return 0 if options else 1


def _extras(
    args: argparse.Namespace, answer: Plan, document: dict[str, Any], text: list[str]
) -> tuple[DecodeBound | None, Concurrency | None, Utilisation | None]:
    """Fills the answers that only some questions have into `document` and `text`."""
    concurrency: Concurrency | None = None
    shares: Utilisation | None = None
    bound: DecodeBound | None = None
    if args.shared_prefix or args.retained_prefixes:
        _prefixes(args, answer, document, text)
    if args.lengths:
        lengths, concurrency, shares = _lengths(args, answer, document)
        text += _render("length_lines", lengths, concurrency, shares)
    if args.batch is not None and args.batch < 1:
        raise UsageError(f"--batch is {args.batch}: it must be positive")
    if args.bound:
        bound = _bound(args, answer, document, text)
    return bound, concurrency, shares


def _prefixes(
    args: argparse.Namespace, answer: Plan, document: dict[str, Any], text: list[str]
) -> None:
    prefixes = importlib.import_module("kvern.plan.prefixes")
    a = answer.allocation
    retained = prefixes.parse_retained(args.retained_prefixes) if args.retained_prefixes else (0, 0)
    shared = args.shared_prefix or 0
    if shared < 0:
        raise UsageError(f"--shared-prefix is {shared}: it must be positive")
    result = prefixes.plan_prefixes(
        a.blocks_of, a.shared_blocks_of, a.usable_blocks, answer.context, shared, retained
    )
    document["prefixes"] = result
    text += _render("prefix_lines", result)


def _lengths(
    args: argparse.Namespace, answer: Plan, document: dict[str, Any]
) -> tuple[Lengths, Concurrency, Utilisation]:
    module = importlib.import_module("kvern.plan.lengths")
    a = answer.allocation
    lengths = module.load_lengths(args.lengths)
    seed = module.SEED if args.seed is None else args.seed
    blocks_of: Callable[[int], int] = a.blocks_of
    concurrency = module.simulate_concurrency(lengths.totals, blocks_of, a.usable_blocks, seed)
    longest = max(answer.request.model.max_model_len or 0, max(lengths.totals))
    shares = module.utilisation(lengths, a.block_size, args.context or longest)
    document["lengths"] = {
        "source": lengths.source,
        "requests": len(lengths.prompts),
        "skipped": lengths.skipped,
        "mean_tokens": concurrency.mean_tokens,
        "fits": {f"{p:g}": n for p, n in concurrency.fits.items()},
        "mean_based": concurrency.mean_based,
        "mean_error": concurrency.mean_error,
        "too_long": concurrency.too_long,
        "trials": concurrency.trials,
        "seed": concurrency.seed,
        "utilisation": shares,
    }
    return lengths, concurrency, shares


def _bound(
    args: argparse.Namespace, answer: Plan, document: dict[str, Any], text: list[str]
) -> DecodeBound:
    roofline = importlib.import_module("kvern.plan.roofline")
    request = answer.request
    if request.device is None:
        raise UsageError("a time bound needs bandwidth and arithmetic: give --device NAME")
    weights = answer.per_rank[answer.tightest_rank].weights_bytes
    if weights is None:
        raise UsageError("a time bound needs the weights: give --weights SIZE")
    batch = args.batch or 1
    bound: DecodeBound = roofline.decode_bound(
        request, request.device, batch, answer.context, weights
    )
    ssd = float(parse_size(args.ssd_bandwidth)) if args.ssd_bandwidth else roofline.SSD_BANDWIDTH
    offload = roofline.offload_bound(request, request.device, answer.context, ssd)
    prefill = roofline.prefill_s(request, request.device, answer.context)
    document["bound"] = {**bound.to_json(), "prefill_s": prefill, "offload": offload}
    text += _render("bound_lines", bound, offload, prefill)
    return bound


def _list_devices(args: argparse.Namespace) -> int:
    devices = load_devices()
    if args.json:
        print_json({"devices": list(devices.values())})
        return 0
    rows = [("id", "name", "memory", "GB/s", "on chip", "confidence")]
    for device in devices.values():
        mark = " (estimated)" if device.memory_is_estimated else ""
        cache = f"{device.cache_bytes / 1e6:g} MB" if device.cache_bytes else "not known"
        rows.append(
            (
                device.id,
                device.name,
                format_size(device.memory_bytes) + mark,
                f"{device.bandwidth / 1e9:,.0f}",
                cache,
                device.confidence,
            )
        )
    print("\n".join(_render("table", rows, "", 2)))
    return 0
