"""`kvern inspect MODEL`: what each layer leaves in the cache, from the configuration alone."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from kvern.catalog import CATALOG, locate
from kvern.cli.output import print_json
from kvern.errors import UsageError
from kvern.spec.budget import bytes_for_context, format_size
from kvern.spec.codec import KV_FORMATS
from kvern.spec.configs import load_model_spec
from kvern.spec.content import Content, Heads, Latent
from kvern.spec.groups import make_kv_groups
from kvern.spec.layers import KVCacheSpec, LayerSpec, ModelSpec
from kvern.spec.pages import KVGroup, KVPlan
from kvern.spec.reach import All, Chunk, Last, Reach, Window
from kvern.spec.regimes import PositionRegimes

DEFAULT_CONTEXT = 4096
MAX_LISTED_CHARACTERS = 34


def add_parser(subparsers: Any) -> None:
    """Adds the command's parser."""
    parser = subparsers.add_parser(
        "inspect",
        help="show what each layer of a model leaves in the cache",
        description="Shows what each layer leaves in the cache, and the bytes of a length. MODEL "
        "is a catalogue name, a GGUF file, a Hugging Face folder or a config.json; weights are not "
        "read.",
    )
    parser.add_argument("model", metavar="MODEL", help="what to describe")
    parser.add_argument(
        "--context",
        type=int,
        metavar="N",
        help="tokens per sequence to count bytes for (default: the model's limit)",
    )
    parser.add_argument(
        "--batch", type=int, default=1, metavar="B", help="sequences to count bytes for"
    )
    parser.add_argument(
        "--kv-format",
        default="bf16",
        metavar="NAME",
        help=f"{', '.join(KV_FORMATS)}, or a mix as in 'int8;0-1=bf16' (default: bf16)",
    )
    parser.add_argument(
        "--block-size", type=int, metavar="N", help="also show the pages for blocks of N tokens"
    )


def run(args: argparse.Namespace) -> int:
    """Prints the description."""
    if args.context is not None and args.context < 1:
        raise UsageError(f"--context is {args.context}: it must be at least 1 token")
    if args.batch < 1:
        raise UsageError(f"--batch is {args.batch}: it must be at least 1 sequence")
    name = args.model if args.model in CATALOG else None
    model = load_model_spec(locate(args.model), name).with_kv_format(args.kv_format)
    context = args.context or model.max_model_len or DEFAULT_CONTEXT
    groups = make_kv_groups(model.layers, args.block_size) if args.block_size is not None else ()
    if args.json:
        print_json(_document(model, args.kv_format, context, args.batch, groups))
    else:
        print("\n".join(_lines(model, args.kv_format, context, args.batch, groups)))
    return 0


@dataclass(frozen=True, slots=True)
class _Row:
    """What tells one kind of layer from another."""

    kind: str
    content: str
    reach: str
    num_kv_heads: int | None
    key_dim: int | None
    value_dim: int | None
    bytes_per_token: int | float
    fixed_bytes: int
    share_with: int | None


def _row(layer: LayerSpec) -> _Row:
    heads, key_dim, value_dim = _geometry(layer.caches)
    shared = [cache.share_with for cache in layer.caches if cache.share_with is not None]
    return _Row(
        kind=layer.kind,
        content=" + ".join(dict.fromkeys(_content_name(c.content) for c in layer.caches)) or "none",
        reach=" + ".join(dict.fromkeys(_reach_name(c.reach, c.stride) for c in layer.caches)),
        num_kv_heads=heads,
        key_dim=key_dim,
        value_dim=value_dim,
        bytes_per_token=layer.bytes_per_token,
        fixed_bytes=layer.fixed_bytes,
        share_with=shared[0] if shared else None,
    )


def _geometry(caches: Sequence[KVCacheSpec]) -> tuple[int | None, int | None, int | None]:
    """KV heads and dims of a layer's first cache of keys; a latent is one head without values."""
    for cache in caches:
        if isinstance(cache.content, Heads):
            content = cache.content
            return content.num_kv_heads, content.key_dim, content.value_dim
        if isinstance(cache.content, Latent):
            return 1, cache.content.latent_dim + cache.content.rope_dim, 0
    return None, None, None


def _content_name(content: Content) -> str:
    return type(content).__name__.lower()


def _reach_name(reach: Reach, stride: int = 1) -> str:
    match reach:
        case All():
            name = "all"
        case Window(size, 0):
            name = f"window({size})"
        case Window(size, sinks):
            name = f"window({size}, sinks={sinks})"
        case Chunk(size):
            name = f"chunk({size})"
        case Last():
            name = "last"
    return name if stride == 1 else f"{name} every {stride}"


def _document(
    model: ModelSpec, kv_format: str, context: int, batch: int, groups: Sequence[KVGroup]
) -> dict[str, Any]:
    document: dict[str, Any] = {
        "model": model.name,
        "architecture": model.architecture,
        "num_layers": model.num_layers,
        "max_model_len": model.max_model_len,
        "position_regimes": _regimes_document(model),
        "kv_format": kv_format,
        "layers": [_layer_document(layer) for layer in model.layers],
        "kv_bytes_per_token": model.kv_bytes_per_token,
        "kv_growing_bytes_per_token": model.kv_growing_bytes_per_token,
        "kv_fixed_bytes": model.kv_fixed_bytes,
        "context": context,
        "batch": batch,
        "kv_bytes": bytes_for_context(model, context, batch),
        "num_mtp_layers": len(model.mtp_layers),
        "num_parameters": model.parameters.total if model.parameters else None,
        "num_parameters_missing": None if model.parameters else _uncounted_reason(model),
    }
    if groups:
        document["groups"] = [_group_document(group) for group in groups]
        document["page_bytes"] = groups[0].page_bytes
        document["kv_bytes_in_pages"] = _bytes_in_pages(groups, context, batch)
        document["open_bytes_per_sequence"] = sum(group.open_page_bytes for group in groups)
        document["row_bytes_per_token"] = _row_bytes(model, groups)
    return document


def _regimes_document(model: ModelSpec) -> dict[str, int | None] | None:
    regimes = model.regimes
    return None if regimes is None else {"border": regimes.border, "step": regimes.step}


def _regimes_line(regimes: PositionRegimes) -> str:
    """What a sequence costs that grows past a border of its positions."""
    if not regimes.is_brief:
        return (
            f"(a sequence that grows past {regimes.border:,} tokens is computed again there, once)"
        )
    return f"(past {regimes.border:,} tokens each token computes its whole sequence again: dynamic NTK)"


def _row_bytes(model: ModelSpec, groups: Sequence[KVGroup]) -> int:
    """Bytes that narrow formats keep of every token of a step."""
    return KVPlan(tuple(groups), groups[0].page_bytes, 2, lenders=model.lenders).row_bytes(1)


def _layer_document(layer: LayerSpec) -> dict[str, Any]:
    fields = ("kind", "content", "reach", "num_kv_heads", "key_dim", "value_dim")
    row = _row(layer)
    document = {"index": layer.index} | {name: getattr(row, name) for name in fields}
    document["bytes_per_token"] = row.bytes_per_token
    document["fixed_bytes"] = row.fixed_bytes
    if row.share_with is not None:
        document["share_with"] = row.share_with
    return document


def _group_document(group: KVGroup) -> dict[str, Any]:
    return {
        "layers": group.layers,
        "content": _content_name(group.spec.content),
        "reach": _reach_name(group.spec.reach),
        "block_size": group.block_size,
        "page_bytes": group.page_bytes,
        "pages_per_entry": group.pages_per_entry,
        "padding_bytes": group.padding_bytes,
        "open_page_bytes": group.open_page_bytes,
    }


def _bytes_in_pages(groups: Sequence[KVGroup], context: int, batch: int) -> int:
    return batch * sum(group.pages_for(context) * group.page_bytes for group in groups)


def _lines(
    model: ModelSpec, kv_format: str, context: int, batch: int, groups: Sequence[KVGroup]
) -> list[str]:
    limit = f", up to {model.max_model_len:,} tokens" if model.max_model_len else ""
    lines = [f"{model.name}: {model.architecture}, {model.num_layers} layers{limit}", ""]
    header = ("layers", "", "content", "reach", "heads", "key", "value", "B/token", "fixed B")
    lines += _table([header, *_folded_rows(model.layers)])
    growing = model.kv_growing_bytes_per_token
    lines += _mtp_lines(model)
    lines += ["", f"a token adds        {model.kv_bytes_per_token:,} B in {kv_format}"]
    if growing != model.kv_bytes_per_token:
        lines[-1] += f"; {growing:,} B once windows and chunks are full"
    if model.kv_fixed_bytes:
        fixed = f"{model.kv_fixed_bytes:,} B ({format_size(model.kv_fixed_bytes)})"
        lines.append(f"a sequence adds     {fixed} whatever its length")
    total = bytes_for_context(model, context, batch)
    lines.append(f"{context:,} tokens × {batch}: {total:,} B ({format_size(total)})")
    lines.append(_parameters_line(model))
    order = model.details.get("layer_order")
    if order:
        lines.append(f"(the order of the layers is {order})")
    if model.regimes is not None:
        lines.append(_regimes_line(model.regimes))
    if model.max_model_len and context > model.max_model_len:
        lines.append(f"(the model's own limit is {model.max_model_len:,} tokens)")
    if groups:
        lines += ["", *_group_lines(groups, context, batch)]
        open_bytes = sum(group.open_page_bytes for group in groups)
        if open_bytes:
            lines.append(
                f"beside the pages: {open_bytes:,} B of open blocks in bf16 for every running sequence, "
                f"{_row_bytes(model, groups):,} B for every token of a step"
            )
    return lines


def _mtp_lines(model: ModelSpec) -> list[str]:
    """Multi-token-prediction layers, which stand beside the decoder's own and in none of the sums."""
    number = len(model.mtp_layers)
    if number == 0:
        return []
    per_token = sum(layer.bytes_per_token for layer in model.mtp_layers)
    kinds = ", ".join(dict.fromkeys(layer.kind for layer in model.mtp_layers))
    return [
        "",
        f"beside these: {number} multi-token-prediction layer{'s' if number > 1 else ''} ({kinds}), "
        f"{per_token:,} B for each token where they are used; not in the sums below",
    ]


def _parameters_line(model: ModelSpec) -> str:
    """How many weights the model has, or why that cannot be said."""
    counts = model.parameters
    if counts is not None:
        active = (
            "" if counts.active_layers == counts.layers else f"; {counts.active:,} for one token"
        )
        return f"parameters          {counts.total:,}{active}"
    return f"parameters          not counted: {_uncounted_reason(model)}"


def _uncounted_reason(model: ModelSpec) -> str:
    """Which field is missing, or that the family's widths are not known."""
    if model.missing_fields:
        return f"the configuration does not state {', '.join(model.missing_fields)}"
    return f"kvern does not know how the weights of {model.family} are laid out"


def _folded_rows(layers: Sequence[LayerSpec]) -> list[tuple[str, ...]]:
    """One row per kind of layer, with all layers of that kind."""
    members: dict[_Row, list[int]] = {}
    for layer in layers:
        members.setdefault(_row(layer), []).append(layer.index)
    rows = []
    for row, indices in members.items():
        reach = f"of layer {row.share_with}" if row.share_with is not None else row.reach
        geometry = [_cell(value) for value in (row.num_kv_heads, row.key_dim, row.value_dim)]
        sizes = [f"{row.bytes_per_token:,}", f"{row.fixed_bytes:,}"]
        rows.append((_ranges(indices), f"{len(indices)} ×", row.content, reach, *geometry, *sizes))
    return rows


def _cell(value: int | None) -> str:
    return "-" if value is None else f"{value:,}"


def _ranges(indices: Sequence[int]) -> str:
    """Layer numbers as ranges, the middle left out where there are many: 0-4, 6-10 ... 60-61."""
    ranges: list[list[int]] = []
    for index in indices:
        if ranges and ranges[-1][-1] == index - 1:
            ranges[-1][1:] = [index]
        else:
            ranges.append([index])
    texts = ["-".join(map(str, bounds)) for bounds in ranges]
    listed = ", ".join(texts)
    if len(listed) <= MAX_LISTED_CHARACTERS:
        return listed
    return f"{', '.join(texts[:3])} ... {texts[-1]}"


def _group_lines(groups: Sequence[KVGroup], context: int, batch: int) -> list[str]:
    header = ("group", "layers", "reach", "block", "pages/entry", "padding B")
    rows = [
        (
            str(number),
            _ranges(group.layers),
            _reach_name(group.spec.reach),
            "-" if group.is_state else f"{group.block_size}",
            f"{group.pages_per_entry}",
            f"{group.padding_bytes:,}",
        )
        for number, group in enumerate(groups)
    ]
    total = _bytes_in_pages(groups, context, batch)
    return [
        f"pages of {groups[0].page_bytes:,} B",
        *_table([header, *rows]),
        f"{context:,} tokens × {batch} in whole pages: {total:,} B ({format_size(total)})",
    ]


def _table(rows: Sequence[tuple[str, ...]]) -> list[str]:
    """Columns side by side: text to the left, numbers to the right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    is_number = [
        all(cell.replace(",", "").replace(".", "").strip("- ×").isdigit() or cell in ("-", "")
            for cell in column)
        for column in zip(*rows[1:], strict=True)
    ]  # fmt: skip
    is_number[0] = False
    return [
        "  ".join(
            cell.rjust(width) if number else cell.ljust(width)
            for cell, width, number in zip(row, widths, is_number, strict=True)
        ).rstrip()
        for row in rows
    ]
