"""The document as text for a terminal."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from kvern.engine.settings import WEIGHTS_AS
from kvern.spec.budget import format_size

NAME_WIDTH = 26
Document = Mapping[str, Any]


def text_report(document: Document) -> str:
    """Everything that was measured, in lines of at most about 110 characters."""
    lines = [*_head(document), ""]
    for item in document["items"]:
        lines += [*item_lines(item), ""]
    if document["kernels"]:
        lines += [*kernel_lines(document["kernels"]), ""]
    if document["cold_start"]:
        lines += [start_line(document["cold_start"]), ""]
    lines += [f"absent: {absent['name']}: {absent['reason']}" for absent in document["absent"]]
    lines += [f"left out: {sentence}" for sentence in document["left_out"]]
    return "\n".join(lines).rstrip()


def _head(document: Document) -> list[str]:
    machine, limits, model = document["machine"], document["limits"], document["model"]
    lines = [
        f"kvern {document['kvern']}, {model['name']} ({format_size(model['bytes'])}), "
        f"{machine['cpu']}, {machine['threads']} threads, medians of {document['runs']} runs",
        f"limits, measured with {limits['source']}: memory reads {limits['read_bytes_per_s'] / 1e9:.1f} GB/s; "
        f"int8 {limits['int8_ops_per_s'] / 1e9:,.0f}, bf16 {limits['bf16_ops_per_s'] / 1e9:,.0f}, "
        f"fp32 {limits['fp32_ops_per_s'] / 1e9:,.0f} GOP/s",
    ]
    lines += [f"warning: {sentence}" for sentence in document["warnings"]]
    if document["quick"]:
        lines.insert(0, "QUICK: tiny sizes, to see that everything works; the figures mean nothing")
    for engine in document["engines"]:
        about = ", ".join(
            str(engine[name]) for name in ("version", "kernel_path", "weights") if engine.get(name)
        )
        same = ", the same file" if engine["same_file"] and engine["peer"] != "kvern" else ""
        lines.append(
            f"  {engine['label']:<{NAME_WIDTH}} {engine['model_file']}{same} ({about}); "
            f"first token {engine['start_s']:.2f} s after the start of its process"
        )
        if engine.get("quality"):
            lines.append(f"  {'':<{NAME_WIDTH}} {quality_sentence(engine['quality'])}")
    return lines


def quality_sentence(quality: Mapping[str, Any]) -> str:
    """How far an engine's logits are from those over float32 keys and values."""
    form = quality["weights_format"]
    weights = "decoded weights" if form == "fp32" else f"weights {WEIGHTS_AS[form]}"
    return (
        f"logits against float32 keys and values, {weights}: mean KL {quality['mean_kl']:.1e} nats (largest "
        f"{quality['max_kl']:.1e}), the same likeliest token at {quality['same_likeliest']:.1%} of "
        f"{quality['positions']} positions"
    )


def item_lines(item: Mapping[str, Any]) -> list[str]:
    """One item: a line for each engine, and what each of our own was bound by."""
    lines = [
        f"{item['key']}: {item['title']}",
        f"  {item['metric']['unit']:<{NAME_WIDTH}} {'median':>9} {'low - high':>19} {'TTFT':>9} "
        f"{'TPOT':>9} {'queue':>8} {'tokens/s':>9} {'KV':>9} {'RSS':>9}",
    ]
    for engine in item["engines"]:
        lines.append(_engine_line(engine))
    for label, sentence in item["errors"].items():
        lines.append(f"  {label}: failed: {sentence}")
    for engine in item["engines"]:
        lines += _own_lines(engine, item["metric"]["more_is_better"])
    return lines


def _engine_line(engine: Mapping[str, Any]) -> str:
    head = engine["headline"]
    spread = f"{number(head['low'])} - {number(head['high'])}"
    used = engine["kv"]["bytes_used"]
    return (
        f"  {engine['label']:<{NAME_WIDTH}} {number(head['median']):>9} {spread:>19} "
        f"{_duration(engine['ttft_s']):>9} {_duration(engine['tpot_s']):>9} "
        f"{_duration(engine['queue_s']):>8} {number(engine['new_tokens_per_s']['median']):>9} "
        f"{_mebibytes(used):>9} {_mebibytes(engine['peak_rss_bytes']['median']):>9}"
    )


def _own_lines(engine: Mapping[str, Any], more_is_better: bool) -> list[str]:
    """What an engine of ours was bound by, and how it compares; peers have no such lines."""
    lines = []
    if engine["profile"] is not None:
        lines.append(f"  {engine['label']}: {bottleneck_sentence(engine['profile'])}")
    ratios = dict(engine["ratios"])
    best = ratios.pop("best peer", None)
    if best is not None:
        better = "more" if more_is_better else "less"
        lines.append(
            f"  {engine['label']}: {_ratio(best)} times the best peer, {best['label']} ({better} is better)"
        )
    if ratios:
        each = "; ".join(f"{label} {_ratio(ratio)}" for label, ratio in ratios.items())
        lines.append(f"  {engine['label']}, ratio to each: {each}")
    return lines


def _ratio(ratio: Mapping[str, Any]) -> str:
    return f"{ratio['median']:.2f} [{ratio['low']:.2f} - {ratio['high']:.2f}]"


def bottleneck_sentence(profile: Mapping[str, Any]) -> str:
    """What a step's time went to, and the share of the limit that was reached."""
    shares = sorted(profile["shares"].items(), key=lambda entry: -entry[1])
    parts = ", ".join(f"{name} {share:.0%}" for name, share in shares if share >= 0.005)
    return (
        f"bound by {profile['bottleneck']} ({parts}; Python in all {profile['python_share']:.0%}; "
        f"queue {profile['queue_share_of_wall']:.0%} of the wall time); "
        f"{profile['share_of_limit']:.0%} of the machine's limit"
    )


def start_line(start: Mapping[str, Any]) -> str:
    """Cold start and where it goes."""
    if "error" in start:
        return f"start: not measured: {start['error']}"
    seconds = start["seconds"]
    return (
        f"start: kvern run shows its first text after {seconds['median']:.2f} s "
        f"[{seconds['low']:.2f} - {seconds['high']:.2f}]; one run spent {start['load_s']:.2f} s on loading and "
        f"{start['ttft_s']:.2f} s on the first token, the rest goes to the interpreter and imports"
    )


def kernel_lines(kernels: Sequence[Mapping[str, Any]]) -> list[str]:
    """Attention alone: microseconds per layer and the share of the bandwidth limit."""
    lines = [
        "attend: one query per sequence, microseconds per layer (share of the bandwidth limit; above "
        "100% where all layers fit a cache)",
        f"  {'context x batch':<18} {'KV':<6} {'limit':>9} {'kvern':>18} {'torch sdpa':>18}",
    ]
    for row in kernels:
        size = f"{row['context']:,} x {row['batch']}"
        lines.append(
            f"  {size:<18} {row['kv_format']:<6} {number(row['limit_s'] * 1e6):>9} "
            f"{kernel_cell(row['kvern']):>18} {kernel_cell(row['torch']):>18}"
        )
    return lines


def kernel_cell(measured: Mapping[str, Any] | str) -> str:
    """``120 (85%)``, or a dash where nothing was measured."""
    if isinstance(measured, str):
        return "-"
    return f"{number(measured['seconds']['median'] * 1e6)} ({measured['share_of_limit']:.0%})"


def number(value: float | None) -> str:
    """Three significant digits or whole numbers; a dash for what is not known."""
    if value is None:
        return "-"
    if value >= 100:
        return f"{value:,.0f}"
    return f"{value:.1f}" if value >= 10 else f"{value:.2f}"


def _duration(spread: Mapping[str, Any] | None) -> str:
    if spread is None:
        return "-"
    seconds = spread["median"]
    return f"{seconds:.2f} s" if seconds >= 1 else f"{seconds * 1e3:.1f} ms"


def _mebibytes(num_bytes: float | None) -> str:
    return "-" if num_bytes is None else f"{num_bytes / 2**20:,.0f} MiB"
