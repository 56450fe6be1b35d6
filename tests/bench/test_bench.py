"""The whole benchmark on the small model, beside a fake peer; and what is shown of it."""

from __future__ import annotations

import json
from collections.abc import Callable
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from kvern.bench import charts
from kvern.bench.html import html_report
from kvern.bench.png import write_png
from kvern.bench.results import SPREAD_FIELDS
from kvern.bench.session import BenchOptions, run_bench, warnings_of
from kvern.bench.text import text_report
from kvern.bench.worker import Worker
from kvern.cli.main import main
from kvern.errors import UsageError

TOP = {
    "schema", "is_complete", "kvern", "date", "quick", "machine", "model", "runs", "limits", "engines",
    "absent", "left_out", "warnings", "items", "kernels", "cold_start",
}  # fmt: skip


@pytest.fixture
def bench(capsys: pytest.CaptureFixture[str]) -> Callable[..., dict[str, Any]]:
    def call(*arguments: str) -> dict[str, Any]:
        assert main(["bench", *arguments, "--quick", "--json"]) == 0
        document: dict[str, Any] = json.loads(capsys.readouterr().out)
        return document

    return call


def own(item: dict[str, Any]) -> dict[str, Any]:
    return next(engine for engine in item["engines"] if engine["label"] == "kvern bf16")


def test_a_quick_run_beside_a_peer(
    bench: Callable[..., dict[str, Any]],
    tiny_model: Path,
    peers_dir: Path,
    tmp_path: Path,
) -> None:
    page = tmp_path / "bench.html"
    document = bench(
        "--model", str(tiny_model), "--cases", "a,b,d,e,e2,sweep", "--runs", "2", "--html", str(page),
        "--against", "llama.cpp,transformers,vllm,openvino", "--peers-dir", str(peers_dir),
    )  # fmt: skip
    assert set(document) == TOP
    check_engines_and_absent(document)
    check_items(document)
    check_prefix_cases(document)
    check_reports(document, page, tmp_path)


def check_engines_and_absent(document: dict[str, Any]) -> None:
    labels = [engine["label"] for engine in document["engines"]]
    assert labels == ["kvern bf16", "llama.cpp Q4_0", "llama.cpp Q8_0"]
    fake = document["engines"][1]
    assert fake["version"] == "fake 1.0" and fake["same_file"]
    assert document["engines"][0]["start_s"] > 0
    assert document["engines"][0]["quality"]["mean_kl"] < 1e-3 and "quality" not in fake
    assert {"model", "num_tokens", "threads", "max_num_seqs"} <= set(fake["saw"])
    reasons = {absent["name"]: absent["reason"] for absent in document["absent"]}
    assert set(reasons) == {"transformers bf16", "vllm", "openvino"}
    assert "no such model" in reasons["transformers bf16"]
    assert "not installed" in reasons["vllm"] and "setup.sh" in reasons["vllm"]
    assert "gone.gguf is missing" in reasons["openvino"]


def check_items(document: dict[str, Any]) -> None:
    for item in document["items"]:
        labels = [engine["label"] for engine in item["engines"]]
        assert labels == ["kvern bf16", "llama.cpp Q4_0"], item["key"]
        ours = own(item)
        assert all(ours[name] is None or len(ours[name]["values"]) == 2 for name in SPREAD_FIELDS)
        assert ours["ratios"]["best peer"]["label"] == "llama.cpp Q4_0"
        assert 0 < ours["kv"]["bytes_used"] <= ours["kv"]["bytes_total"]
        profile = ours["profile"]
        assert sum(profile["shares"].values()) == pytest.approx(1.0)
        assert profile["share_of_limit"] > 0
        assert profile["phases"][profile["phase"]]["steps"] > 0
    first = document["items"][0]
    assert first["key"] == "a"
    assert first["errors"] == {"llama.cpp Q8_0": "llama.cpp Q8_0: RuntimeError: out of memory"}
    theirs = first["engines"][1]["headline"]["values"]
    ratio = own(first)["ratios"]["llama.cpp Q4_0"]["values"]
    assert ratio == pytest.approx(
        [a / b for a, b in zip(own(first)["headline"]["values"], theirs, strict=True)]
    )


def check_prefix_cases(document: dict[str, Any]) -> None:
    cached = {item["key"]: own(item)["cached_tokens"] for item in document["items"]}
    assert cached["e"] == 4 * 64  # the shared tokens of four requests
    assert cached["e2"] < cached["e"]
    assert cached["a"] == cached["b-64"] == cached["d"] == 0
    assert cached["kv-64"] > 0  # the sweep continues


def check_reports(document: dict[str, Any], page: Path, folder: Path) -> None:
    text = text_report(document)
    assert text.startswith("QUICK")
    for part in ("TTFT", "llama.cpp Q4_0", "bound by", "the best peer", "absent: vllm"):
        assert part in text
    html = page.read_text()
    assert html == html_report(document)
    assert well_formed(html)
    assert "http" not in html.replace("http://www.w3.org/2000/svg", "")  # nothing is fetched
    assert html.count("<svg") == 8  # a, b (two), d, e, e2, the sweep, bottlenecks
    pytest.importorskip("matplotlib")
    write_png(document, folder / "bench.png")
    assert (folder / "bench.png").read_bytes().startswith(b"\x89PNG")


def well_formed(html: str) -> bool:
    class Checker(HTMLParser):
        def __init__(self) -> None:
            super().__init__()
            self.open: list[str] = []
            self.is_good = True

        def handle_starttag(self, tag: str, attrs: Any) -> None:
            if tag != "meta":
                self.open.append(tag)

        def handle_startendtag(self, tag: str, attrs: Any) -> None:
            pass

        def handle_endtag(self, tag: str) -> None:
            self.is_good &= bool(self.open) and self.open.pop() == tag

    checker = Checker()
    checker.feed(html)
    return checker.is_good and not checker.open


def test_several_kv_formats_are_compared_with_each_other(
    bench: Callable[..., dict[str, Any]], tiny_model: Path
) -> None:
    document = bench(
        "--model", str(tiny_model), "--cases", "a", "--kv-format", "bf16,fp32", "--threads", "1"
    )
    bf16, fp32 = document["items"][0]["engines"]
    assert (bf16["label"], fp32["label"]) == ("kvern bf16", "kvern fp32")
    assert set(bf16["ratios"]) == {"kvern fp32"}
    assert fp32["kv"]["bytes_used"] == 2 * bf16["kv"]["bytes_used"]


def test_attention_alone(bench: Callable[..., dict[str, Any]], tiny_model: Path) -> None:
    document = bench(
        "--model",
        str(tiny_model),
        "--cases",
        "attend",
        "--kv-format",
        "bf16,fp32",
        "--threads",
        "1",
    )
    assert document["items"] == []
    rows = document["kernels"]
    assert [(row["context"], row["batch"], row["kv_format"]) for row in rows] == [
        (64, 1, "bf16"),
        (64, 1, "fp32"),
        (64, 2, "bf16"),
        (64, 2, "fp32"),
    ]
    for row in rows:
        assert row["kv_bytes"] == row["context"] * row["batch"] * 2 * 2 * 16 * (
            2 if row["kv_format"] == "bf16" else 4
        )
        assert row["kvern"]["seconds"]["median"] > 0
        assert isinstance(row["torch"], dict) or "torch" in row["torch"]
    assert "torch sdpa" in text_report(document)
    assert "Attention alone" in html_report(document)


def test_cold_start(
    bench: Callable[..., dict[str, Any]], smollm2_path: Path, tiny_model: Path
) -> None:
    document = bench("--model", str(smollm2_path), "--cases", "start")
    start = document["cold_start"]
    assert start["seconds"]["median"] > 0 and start["load_s"] > 0 and start["ttft_s"] > 0
    assert "kvern run shows its first text after" in text_report(document)
    assert "Cold start" in html_report(document)
    without_tokenizer = bench("--model", str(tiny_model), "--cases", "start")
    assert "error" in without_tokenizer["cold_start"]
    assert "start: not measured" in text_report(without_tokenizer)


def test_a_run_that_is_cut_short_keeps_what_it_measured(
    bench: Callable[..., dict[str, Any]],
    tiny_model: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    out = tmp_path / "bench.json"
    arguments = ("--model", str(tiny_model), "--threads", "1", "--out", str(out))
    whole = Worker.ask

    def until_d(worker: Worker, verb: str, args: Any = None) -> Any:
        if args and args.get("item") == "d":
            raise KeyboardInterrupt
        return whole(worker, verb, args)

    monkeypatch.setattr(Worker, "ask", until_d)
    with pytest.raises(KeyboardInterrupt):
        run_bench(
            BenchOptions(str(tiny_model), ("a", "d"), threads=1, runs=1, quick=True),
            keep=lambda document: out.write_text(json.dumps(document)) and None,
        )
    monkeypatch.undo()
    short = json.loads(out.read_text())
    assert [item["key"] for item in short["items"]] == ["a"] and not short["is_complete"]
    assert text_report(short)
    document = bench(*arguments, "--cases", "a,d", "--resume")
    assert document["is_complete"] and document == json.loads(out.read_text())
    assert document["items"][0] == short["items"][0]
    assert [item["key"] for item in document["items"]] == ["a", "d"]
    assert "has runs 1, this one 2" in refused(
        capsys, *arguments, "--quick", "--runs", "2", "--resume"
    )
    assert "name it with --out" in refused(capsys, "--resume")
    out.write_text("{")
    assert "is no document of kvern bench" in refused(capsys, *arguments, "--quick", "--resume")


def refused(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    assert main(["bench", *arguments]) == 2
    return capsys.readouterr().err


def test_wrong_use_is_one_sentence(
    capsys: pytest.CaptureFixture[str], tiny_model: Path, tmp_path: Path
) -> None:
    model = ("--model", str(tiny_model))
    assert "case 'z' is unknown" in refused(capsys, *model, "--cases", "z")
    assert "2 runs tell no spread" in refused(capsys, *model, "--runs", "2")
    assert "peer 'ollama' is unknown" in refused(
        capsys, *model, "--against", "ollama", "--cases", "a"
    )
    assert "nothing to measure" in refused(capsys, *model, "--cases", "c")
    with pytest.raises(UsageError, match="threads is 0"):
        BenchOptions("m", ("a",), threads=0)


def test_a_busy_machine_is_told() -> None:
    quiet = {"load_average_before": 0.1, "cores": 2, "threads": 2}
    assert warnings_of(quiet) == []
    (sentence,) = warnings_of(quiet | {"load_average_before": 3.0})
    assert "load average 3.0 on 2 cores" in sentence
    assert "4 threads on 2 cores" in warnings_of(quiet | {"threads": 4})[0]


def test_charts_keep_their_scale() -> None:
    bars = [
        charts.Bar("ours", 10.0, 9.0, 12.0, "10.0", True),
        charts.Bar("<theirs>", 5.0, 5.0, 5.0, "5.00"),
    ]
    svg = charts.bar_chart(bars, [(12.0, "limit")])
    assert "&lt;theirs&gt;" in svg and "<theirs>" not in svg
    widths = [float(part.split('"')[0]) for part in svg.split('width="')[1:]]
    assert widths[0] == pytest.approx(2 * widths[1], abs=0.2)
    line = charts.Line("one", ((64.0, 10.0), (8192.0, 5.0)), True)
    assert charts.line_chart([line], "x", "y").count("<circle") == 2
    assert charts.line_chart([], "x", "y") == ""
    assert charts.share_chart([("row", {"a": 0.25, "b": 0.75})]).count("<title>") == 2
