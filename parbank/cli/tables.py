"""How `eval` prints its results: one model, several models side by side, and a breakdown."""

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Column, Table
from rich.text import Text

from parbank.cli.scoring import UNPACKED
from parbank.cli.terminal import print_pairs, printable
from parbank.display import plural
from parbank.errors import ConfigError
from parbank.training.laps import Laps

SHOWN_DOCUMENTS = 10

_FORMATS = {
    **dict.fromkeys(("val_bpb", "val_loss", "their_bpb"), "{:.6f}"),
    "difference_bpb": "{:+.6f}",
    **dict.fromkeys(("tokens", "bytes", "documents"), "{:,}"),
    "seconds": "{:.1f}",
    "tokens_per_second": "{:,.0f}",
}


def show_result(result: dict[str, Any], as_json: bool, *, checkpoint: bool = False) -> None:
    """Prints all digits as JSON, and otherwise the significant digits. `checkpoint`: the run also has a
    checkpoint, which --unpacked scores."""
    if as_json:
        print(json.dumps(result))
        return
    beside, _ = result.pop("beside", {}), result.pop("times", None)
    shown = {key: _FORMATS.get(key, "{}").format(value) for key, value in result.items() if value is not None}
    if adapt := result.get("adapt"):
        shown["adapt"] = ", ".join(f"{key} {value}" for key, value in adapt.items() if value not in ((), None))
    if audit := result.get("audit"):
        shown["audit"] = "probabilities at {positions:,} positions sum to 1 within {worst_deviation:.1e}".format(
            **audit
        )
    if proof := result.get("proof"):
        shown["proof"] = _describe_proof(proof)
    if plain := result.get("plain"):
        shown["plain"] = _describe_plain(plain)
    print_pairs(shown)
    if beside:
        table = Table("the same text", "bits per byte")
        for name, bpb in {"this model": result["val_bpb"], **beside}.items():
            table.add_row(name, f"{bpb:.4f}")
        if checkpoint and UNPACKED not in beside:
            table.add_row(UNPACKED, "not scored; add --unpacked")
        Console(highlight=False).print(table)


def show_results(results: dict[str, dict[str, Any]], laps: Laps, as_json: bool) -> None:
    """Every model in one table, with its difference from the first one."""
    from parbank.eval.paired import compare_models

    parts = {name: result.pop("breakdown").by_document for name, result in results.items()}
    first, *others = parts
    bits = {name: [part.bits for part in own] for name, own in parts.items()}
    sizes = [part.bytes for part in parts[first]]
    found = compare_models(sizes, bits[first], {name: bits[name] for name in others})
    if as_json:
        models = [{"model": name, **result} for name, result in results.items()]
        differences = [{"model": name, "against": first, **asdict(against)} for name, against in found.items()]
        print(json.dumps({"models": models, "differences": differences, "times": laps.seconds}))
        return
    beside = results[first].pop("beside")
    names = Column("model", overflow="fold")  # two names may differ at their ends only
    method = results[first]["method"]
    plain = ["streaming bpb"] if "plain" in results[first] else []  # the score without the adapting
    table = Table(names, f"{method} bpb", *plain, "difference", "95% interval", "verdict")
    for name, result in results.items():
        against = found.get(name)  # None for the first model
        shown = [] if against is None else [f"{against.bpb:+.4f}", _interval(against), against.describe()]
        own = [f"{result['plain']['val_bpb']:.4f}"] if plain else []
        table.add_row(Text(name), f"{result['val_bpb']:.4f}", *own, *shown)
    for name, bpb in beside.items():
        table.add_row(name, f"{bpb:.4f}")
    Console(highlight=False).print(table)
    for name, result in results.items():
        if proof := result.get("proof"):
            print(f"{name}: {_describe_proof(proof)}")
    documents = sum(size > 0 for size in sizes)
    corrected = f", corrected for {len(found)} comparisons (Holm)" if len(found) > 1 else ""
    print(f"differences from {first} by {plural(documents, 'document')}: a paired t test{corrected}")
    contexts = {name: result["context"] for name, result in results.items()}
    if len(set(contexts.values())) > 1:
        listed = ", ".join(f"{name} {context:,}" for name, context in contexts.items())
        print(f"note: the models read windows of different lengths (tokens: {listed}); --context N gives all the same")


def _interval(difference: Any) -> str:
    return "" if difference.low is None else f"{difference.low:+.4f} to {difference.high:+.4f}"


def _describe_proof(proof: dict[str, Any]) -> str:
    return (
        "compressed to {file_bytes:,} bytes ({file_bpb:.4f} bits per byte; the model's score in the same {segments} segments "
        "is {score_bpb:.4f}), decompressed, and identical".format(**proof)
    )


def _describe_plain(plain: dict[str, Any]) -> str:
    worst = plain["worst_document_bpb"]
    changed = f"loses {worst:.5f}" if worst > 0 else f"gains {-worst:.5f}"
    return f"{plain['val_bpb']:.6f} by {plain['method']}; adapting gains {plain['gain_bpb']:.4f}, and the worst document {changed}"


def show_breakdown(found: Any) -> None:
    """Prints three tables. Of many documents, the table shows those that cost the most bits."""
    out = Console(highlight=False)
    for title, parts in (("tokens of context", found.by_context), ("place in document", found.by_place)):
        table = Table(title, "tokens", "bytes", "bpb")
        for part in parts:
            name = str(part.first) if part.first == part.last else f"{part.first:,}-{part.last:,}"
            table.add_row(name, f"{part.tokens:,}", f"{part.bytes:,}", _bpb(part))
        out.print(table)
    documents = sorted(found.by_document, key=lambda part: -part.bits)
    table = Table("document", "tokens", "bytes", "bpb", "begins")
    for part in documents[:SHOWN_DOCUMENTS]:
        opening = Text(printable(part.opening)[:40])  # not a plain string: rich would read [...] in it as its own
        table.add_row(f"at {part.first:,}", f"{part.tokens:,}", f"{part.bytes:,}", _bpb(part), opening)
    out.print(table)
    if len(documents) > SHOWN_DOCUMENTS:
        print(f"the {SHOWN_DOCUMENTS} documents with the most bits, of {len(documents):,}; --json has all")


def _bpb(part: Any) -> str:
    return "-" if part.bpb is None else f"{part.bpb:.4f}"


def draw_breakdown(found: Any, title: str, picture: Path) -> None:
    from parbank.data.progress import say_on_stderr
    from parbank.eval.breakdown import draw

    try:
        draw(found, title, picture)
        say_on_stderr(f"wrote {picture}")
    except ConfigError as error:  # no matplotlib: the tables are worth having without the picture
        say_on_stderr(f"note: {error}")
