"""One or several models scored on one text: the work of `eval`."""

import sys
from concurrent.futures import Future
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from parbank.errors import ConfigError
from parbank.training.laps import Laps

if TYPE_CHECKING:
    from parbank.eval.aside import ScoringKernels
    from parbank.eval.methods.base import Method

LARGEST_BESIDE = 1 << 26  # bytes of text for xz and zstd, which then take a minute
UNPACKED = "this model, unpacked"


@dataclass(frozen=True, kw_only=True)
class EvalOptions:
    """The options of `parbank eval`."""

    data: str | None
    method: str
    context: int | None
    settings: dict[str, Any]
    theirs: dict[str, Any] | None
    """An earlier result, to be compared with."""
    breakdown: bool
    """Also by document and by context; needed to compare several models."""
    audit: bool
    prove: bool
    segments: int | None
    device: str
    threads: int | None


def check_request(request: EvalOptions) -> None:
    """Refuses requests that cannot be proved, before anything is read."""
    if request.segments is not None and not request.prove:
        raise ConfigError("--segments says how --prove divides the text; give both")
    if not request.prove:
        return
    from parbank.eval.compressor.coder import check_lanes

    check_lanes(request.segments)
    if request.method != "streaming":
        raise ConfigError(
            f"--prove compresses with the streaming model, and the method is {request.method}; add --method streaming"
        )


def score_models(paths: dict[str, Path], request: EvalOptions, laps: Laps) -> list[dict[str, Any]] | None:
    """The results in the order of the models, on the first rank; the first one also has the other compressors. Settings
    that cannot be run or compared are refused before the work."""
    from parbank import runtime
    from parbank.display import Display
    from parbank.eval.aside import ScoringKernels
    from parbank.threads import compute_with
    from parbank.training.compiled import use_compile_cache

    use_compile_cache()
    results: list[dict[str, Any]] = []
    with runtime.start(request.device) as place, compute_with(request.threads):
        beside = _Beside()
        display = Display(enabled=place.is_main, file=sys.stderr)
        kernels = ScoringKernels(place, display.say)
        laps.end("import")
        try:
            for name, path in paths.items():
                label = f" {name}" if len(paths) > 1 else ""
                spec, result = _score_model(path, request, place, display, laps, label, beside, kernels)
                request = replace(request, data=spec)  # every rank scores the later models on the text of the first
                if result is None:
                    continue
                if results and result["text_sha256"] != results[0]["text_sha256"]:
                    raise ConfigError(f"{name} was scored on another text than {next(iter(paths))}; give one by --data")
                results.append(result)
        except BaseException:  # an interruption too: the scores before it took their time
            for name, result in zip(paths, results):
                display.say(f"before this, {name} scored {result['val_bpb']:.6f} bits per byte")
            raise
        if place.is_main:
            compressors = beside.result()
            laps.end("compressors")
            unpacked = _find_unpacked(next(iter(paths.values())), results[0]) if len(paths) == 1 else {}
            results[0]["beside"] = unpacked | compressors
    return results if place.is_main else None


def _score_model(
    path: Path,
    request: EvalOptions,
    place: Any,
    display: Any,
    laps: Laps,
    label: str,
    beside: "_Beside",
    kernels: "ScoringKernels",
) -> tuple[str, dict[str, Any] | None]:
    """The data spec that was scored, and, on the first rank, the result."""
    from parbank.data.validation import open_validation
    from parbank.eval.audit import POSITIONS, audited
    from parbank.eval.breakdown import break_down, compare_with_plain
    from parbank.eval.methods import make_method
    from parbank.eval.result import refuse_unlike
    from parbank.training.load import load_model

    laps.end("import")

    def choose_method(own: int) -> "Method":
        context = own if request.context is None else request.context
        return make_method(request.method, **{"context": context, **request.settings})

    loaded = load_model(path, place.device, lambda config, own: kernels.begin(config, lambda: choose_method(own)))
    laps.end("model")
    method = choose_method(loaded.context)
    spec, theirs = request.data or loaded.data, request.theirs
    if spec is None:
        raise ConfigError(f"{path} was trained on text without a public name; say by --data what to score")
    if theirs is not None:
        refuse_unlike(method.describe(), theirs, "the result to compare with")
    validation = place.in_turn(lambda: open_validation(spec, loaded.tokenizer, say=display.say))
    about = method.describe() | validation.describe()
    if theirs is not None:
        refuse_unlike(about, theirs, "the result to compare with")
    if place.world > 1:
        _compare_ranks(loaded, about, request, place)
    laps.end("text")
    if place.is_main:
        beside.begin(loaded.tokenizer, validation.tokens)
    kernels.wait()
    laps.end("kernels")
    thorough = audited(loaded.model, place.device, POSITIONS) if request.audit else nullcontext()
    with display.progress(f"scoring{label}") as progress, thorough as audit:
        began = laps.seconds.get("first piece", 0.0) + laps.seconds.get("scoring", 0.0)
        scored = method.score(
            loaded.model, validation.tokens, place, _note_first(progress, laps), tokenizer=loaded.tokenizer
        )
        score = scored.total(loaded.tokenizer)
        laps.end("scoring")
    seconds = laps.seconds.get("first piece", 0.0) + laps.seconds["scoring"] - began
    audit_result = {}
    if audit is not None:
        method.audit(audit, loaded.model, scored, place, tokenizer=loaded.tokenizer)
        found = audit.gather(place)
        found.refuse_faults()
        audit_result["audit"] = found.describe()
    if not place.is_main:
        return spec, None
    if (idle := method.find_idle(scored.tokens, loaded.model.config)) is not None:
        display.say(f"note: {idle}")
    result = {
        "val_bpb": score.bpb,
        "val_loss": score.loss,
        "tokens": score.tokens,
        "bytes": score.bytes,
        "seconds": seconds,
        "tokens_per_second": score.tokens / max(seconds, 1e-9),
        "data": spec,
        "tokenizer_sha256": loaded.tokenizer.fingerprint,
        **about,
        **audit_result,
    }
    if scored.plain is not None:
        result["plain"] = {"method": "streaming", **compare_with_plain(scored, loaded.tokenizer)}
    if request.prove:
        from parbank.eval.compressor.proof import prove

        with display.progress(f"proving{label}") as progress:
            proved = replace(loaded, context=method.context)
            result["proof"] = prove(proved, validation.tokens, segments=request.segments, progress=progress)
        laps.end("proving")
    if request.breakdown:
        result["breakdown"] = break_down(scored, loaded.tokenizer, method, loaded.model.config)
    return spec, result


def _compare_ranks(loaded: Any, about: dict[str, Any], request: EvalOptions, place: Any) -> None:
    """Refuses ranks whose model, tokenizer, text or method differ."""
    from parbank.config import to_dict
    from parbank.training.agreement import compare_scoring  # takes a second to import

    same = {f"model.{name}": value for name, value in to_dict(loaded.model.config).items()}
    same |= {"tokenizer_sha256": loaded.tokenizer.fingerprint, "--audit": request.audit}
    compare_scoring(loaded.model, same | about, place)


def _find_unpacked(path: Path, result: dict[str, Any]) -> dict[str, float]:
    """The score of the weights before packing, where the run's summary has it for this artifact, text and method: another
    pass over the text would take as long as the score itself, and is left to --unpacked."""
    from parbank.config import parse_json

    artifact = path / "model.pbk" if path.is_dir() else path
    try:
        summary = parse_json((artifact.parent / "summary.json").read_bytes())
        config = parse_json((artifact.parent / "config.json").read_bytes())
        same = (
            artifact.stat().st_size == summary["artifact_bytes"]
            and abs(result["val_bpb"] - summary["val_bpb"]) < 0.001  # rounding, on another device
            and (result["text_sha256"], result["tokens"]) == (summary["val_text_sha256"], summary["val_tokens"])
            and (result["method"], result["context"]) == ("chunked", config["batch"]["sequence_length"])
        )
        return {UNPACKED: float(summary["val_bpb_before_packing"])} if same else {}
    except (OSError, ValueError, KeyError, TypeError):
        return {}


def _note_first(progress: Any, laps: Laps) -> Any:
    """Progress that notes when the first piece of the text was scored: kernels are compiled until then."""
    begun = False

    def move(share: float) -> None:
        nonlocal begun
        if not begun:
            laps.end("first piece")
            begun = True
        progress(share)

    return move


class _Beside:
    """Other compressors on the same text, in threads of their own while the model is scored."""

    def __init__(self) -> None:
        self._future: Future[dict[str, float]] | None = None

    def begin(self, tokenizer: Any, tokens: Any) -> None:
        """The first text counts: all models are scored on it."""
        from parbank.threads import run_in_background

        if self._future is None:
            self._future = run_in_background(partial(_compress, tokenizer, tokens), "parbank-beside")

    def result(self) -> dict[str, float]:
        return self._future.result() if self._future is not None else {}


def _compress(tokenizer: Any, tokens: Any) -> dict[str, float]:
    from parbank.eval.compression import compressor_bpb

    text = tokenizer.decode_bytes(tokens.read(0, len(tokens)))
    return compressor_bpb(text) if len(text) <= LARGEST_BESIDE else {}
