"""Fits the laws to runs, and writes the fit and its residuals beside the data.

    python -m parbank.plan.fit                      from data/*.json to data/fit.json and data/residuals.md
    python -m parbank.plan.fit MORE... --out DIR    with more runs: files of rows, or folders of studies

A fit is the most probable one: least squares with the priors of laws.PRIORS, so that a parameter that the runs say little
about stays near published values. The same information gives the covariance, and with it how certain a prediction is.
`PARBANK_PLAN_FIT=FILE` makes plans use another fit, for a machine or a kind of text of your own.
"""

import argparse
import json
import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from parbank.errors import ConfigError, ParbankError, reason
from parbank.files import write_file
from parbank.plan.laws import (
    DATA,
    FEW_TOKENS,
    FIELDS,
    LEAST_STEPS,
    NAMES,
    PRIORS,
    Array,
    Cases,
    CpuTexts,
    PackingLaw,
    TokenSizes,
    differentiate,
    longer_tokens,
    predict_score,
)
from parbank.plan.studies import read_study_rows

Row = dict[str, Any]
TRIED = ("matrices", "vocab", "batch_tokens", "bigrams")  # in the order of Laws.distances
# Bytes of text below which a run is left out, unless it is of the grid `epochs`: some ten documents are unlike any other ten.
LEAST_TEXT = 500_000
# The grid `epochs` asks how a score rises with the repeats of a small text. It falls by a tenth or doubles there, so the law has
# to be right to a share of the score only, and such a text may be far from what zlib says of the whole.
REPEATED_ERROR, SMALL_TEXT_SPREAD = 0.03, 0.3
# How far a plan may be from the score of a small text, as a share: those that were measured lie within 0.4 of what it expects.
PLANNED_SPREAD = 0.2
RUNS = (DATA / "runs.json", DATA / "packing.json")
SMALL_RUNS, MIDDLE_RUNS = DATA / "small.json", DATA / "middle.json"
"""Runs of the grids `small` and `middle`, with the weight decay of a plan for a CPU, on texts of 30 kB to 2 MB."""
# The scatter to expect about a law with so few parameters, in runs of very many steps; seeds alone differ by as much.
SCATTER = 0.001
# A run of so many steps counts with twice that scatter, one of 2,000 with 0.0035, one of 128 with 0.04: short runs end while
# the score still falls steeply, and do not rank models.
SHORT_STEPS = 5000
# Values of "options" of rows whose settings differ from those of the others of their device, each with a factor of its own: those
# of a plan for a GPU against those of `sprint`, and batches of 4,096 in windows of 512 tokens on a CPU against 256. What they may
# change, as a logarithm.
OPTIONS, OPTIONS_SPREAD = ("auto", "windows-512"), 0.05
# Runs of so many steps say which sizes of models were tried in earnest.
LONG_STEPS = 800
# How far a text's score is from what zlib says of it, as a logarithm: the prior of the factors of fitted texts, and the deviation
# for a new text. The fitted factors lie within 0.1 of 1. Over nine texts, two models deviated by 0.18 and 0.19
# (docs/log/training.md).
TEXT_SPREAD, NEW_TEXT_SPREAD = 0.08, 0.18
# Runs of so many steps are left out of the fit, one at a time, to see how well it predicts them.
PREDICTED_STEPS = 200
# A run is also predicted from those with at most this share of its tokens: how wrong a plan is beyond its data.
SHORTER = 0.7


def read_rows(paths: Sequence[Path]) -> tuple[list[Row], list[Row]]:
    """Rows of scores, and rows of packing, from files of JSON and folders of studies."""
    rows: list[Row] = []
    for path in paths:
        found = read_study_rows(path) if path.is_dir() else _read_file(path)
        if not any(_counts(row) or "bits_per_weight" in row for row in found):
            raise ConfigError(
                f"{path} has no run that a fit can use: give runs of {LEAST_STEPS} steps or more, on {LEAST_TEXT:,} bytes of text "
                "or more"
            )
        rows += found
    scores = [row for row in rows if _counts(row)]
    for row in scores:
        if lacking := [name for name in (*FIELDS, "key", "scored", "steps") if name not in row]:
            raise ConfigError(
                f"the run {row.get('key', row)} lacks {', '.join(lacking)}; benchmarks/plan_runs.py writes them"
            )
    return scores, [row for row in rows if "bits_per_weight" in row]


def _read_file(path: Path) -> list[Row]:
    try:
        text = path.read_text(encoding="utf-8").strip()
        found: list[Row] = (
            json.loads(text) if text.startswith("[") else [json.loads(line) for line in text.splitlines()]
        )
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"cannot read runs from {path}: {reason(error)}; give a JSON list, JSON lines, or the folder of a study"
        ) from error
    return found


def _counts(row: Row) -> bool:
    """Whether a row is a run of a whole schedule, with settings that the laws know, on text enough."""
    if "bpb" not in row or row.get("extra") or row.get("steps", 0) < LEAST_STEPS:
        return False
    return _is_repeated(row) or bool(row.get("text_bytes", LEAST_TEXT) >= LEAST_TEXT)


def make_cases(rows: Sequence[Row]) -> Cases:
    return Cases.of(**{name: np.array([row[name] for row in rows], np.float64) for name in FIELDS})


def level(row: Row) -> str:
    """What a run shares its own factor with: runs that were scored on the same text. Runs of the grid `tables` are compared
    with each other alone: on their part of the standard library four times the tokens gain more than the law says. So are runs
    that repeat a small text."""
    scored: str = row["scored"]
    if _is_repeated(row):
        return f"{scored}, {row['text_bytes']} bytes of text"
    return f"{scored}, {row['tokens']} tokens" if row.get("grid") == "tables" else scored


def _options_of(row: Row) -> list[float]:
    """Which of OPTIONS a run has."""
    return [float(row.get("options") == name) for name in OPTIONS]


def _is_repeated(row: Row) -> bool:
    return row.get("grid") == "epochs"


def _expected_error(row: Row, scatter: float = SCATTER) -> float:
    """The standard deviation of a run about the law."""
    short = scatter * (1 + SHORT_STEPS / row["steps"])
    return math.hypot(short, REPEATED_ERROR * row["bpb"]) if _is_repeated(row) else short


@dataclass(frozen=True, kw_only=True)
class ScoreFit:
    """A fit of scores. Logs: of the parameters, of each text's factor, and of those of OPTIONS."""

    logs: Array
    covariance: Array
    texts: tuple[str, ...]
    residuals: Array
    """Measured minus predicted."""

    @property
    def factors(self) -> dict[str, float]:
        return dict(zip(self.texts, np.exp(self.logs[len(NAMES) : -len(OPTIONS)]).tolist()))

    def predict(self, row: Row) -> tuple[float, float]:
        """The score of a run that may be new, and its standard deviation, as `Laws.deviations` has them."""
        cases, known = make_cases([row]), level(row) in self.texts
        factors = np.zeros(len(self.logs))
        if known:
            factors[len(NAMES) + self.texts.index(level(row))] = 1.0
        factors[-len(OPTIONS) :] = _options_of(row)

        def score(logs: Array) -> Array:
            found: Array = predict_score(logs[: len(NAMES)], cases) * np.exp(logs @ factors)
            return found

        found, slopes = float(score(self.logs)[0]), differentiate(score, self.logs)[0]
        unknown = 0.0 if known else (SMALL_TEXT_SPREAD if _is_repeated(row) else TEXT_SPREAD) * found
        return found, math.sqrt(slopes @ self.covariance @ slopes + _expected_error(row) ** 2 + unknown**2)


def fit_score(rows: Sequence[Row], scatter: float = SCATTER, start: Array | None = None) -> ScoreFit:
    """The most probable fit, by Levenberg and Marquardt from the priors, or from `start`.

    A text may be easier or harder than zlib says, and so may the part of it that was scored. So every scored part has a factor
    of its own, fitted with the rest. A new text has none, which makes its prediction less certain.
    """
    cases, measured = make_cases(rows), np.array([row["bpb"] for row in rows])
    names = sorted({level(row) for row in rows})
    errors_expected = np.array([_expected_error(row, scatter) for row in rows])
    spreads = {level(row): SMALL_TEXT_SPREAD if _is_repeated(row) else TEXT_SPREAD for row in rows}
    own = np.array([names.index(level(row)) for row in rows])
    mean, width = (np.array(column) for column in zip(*PRIORS.values()))
    planned = np.array([_options_of(row) for row in rows])
    mean = np.concatenate([mean, np.zeros(len(names) + len(OPTIONS))])
    width = np.concatenate([width, [spreads[name] for name in names], [OPTIONS_SPREAD] * len(OPTIONS)])

    def predict(log: Array) -> Array:
        found: Array = predict_score(log[: len(NAMES)], cases) * np.exp(
            log[len(NAMES) : -len(OPTIONS)][own] + planned @ log[-len(OPTIONS) :]
        )
        return found

    def errors(log: Array) -> Array:
        return np.concatenate([(predict(log) - measured) / errors_expected, (log - mean) / width])

    at, covariance = _minimise(errors, mean if start is None else start)
    return ScoreFit(logs=at, covariance=covariance, texts=tuple(names), residuals=measured - predict(at))


def _minimise(errors: Callable[[Array], Array], start: Array) -> tuple[Array, Array]:
    """Where the sum of squared errors is least, by Levenberg and Marquardt, and the covariance there."""
    at, damping = start.copy(), 1.0
    now = errors(at)
    for _ in range(500):
        slopes = differentiate(errors, at)
        normal = slopes.T @ slopes
        step = np.linalg.solve(normal + damping * np.diag(np.diag(normal)), -slopes.T @ now)
        then = errors(at + step)
        if then @ then < now @ now:
            gained = now @ now - then @ then
            at, now, damping = at + step, then, damping / 3
            if gained < 1e-9:
                break
        else:
            damping *= 4
            if damping > 1e12:
                break
    slopes = differentiate(errors, at)
    covariance: Array = np.linalg.inv(slopes.T @ slopes).astype(np.float64)
    return at, covariance


@dataclass(frozen=True, kw_only=True)
class LeftOut:
    """A run that the fit did not see: its errors, measured minus predicted, and the standard deviations to expect."""

    key: str
    alone: tuple[float, float]
    """Without this run."""
    edge: tuple[float, float]
    """Without all runs of this device that are longer, or nearly as long."""


def leave_out(rows: Sequence[Row]) -> list[LeftOut]:
    """Predicts each run of PREDICTED_STEPS or more from the others, and from the shorter ones."""
    found, whole = [], fit_score(rows)
    for row in rows:
        if row["steps"] < PREDICTED_STEPS:
            continue
        others = [other for other in rows if other is not row]
        most = SHORTER * row["tokens"]
        shorter = [other for other in others if other["tokens"] <= most or other.get("device") != row.get("device")]
        errors = []
        for kept in (others, shorter):
            same = {level(one) for one in kept} == set(whole.texts)
            predicted, deviation = fit_score(kept, start=whole.logs if same else None).predict(row)
            errors.append((row["bpb"] - predicted, deviation))
        found.append(LeftOut(key=row["key"], alone=errors[0], edge=errors[1]))
    return found


def inflate(left_out: Sequence[LeftOut]) -> float:
    """Errors over the deviations to expect: their root mean square, or half of what 95% of them stay below, where that is more;
    and 1 at least."""
    ratios = np.array([error / deviation for one in left_out for error, deviation in (one.alone, one.edge)])
    if not ratios.size:
        return 1.0
    return max(1.0, float(np.sqrt(np.mean(ratios**2))), float(np.quantile(np.abs(ratios), 0.95)) / 2)


def fit_packing(rows: Sequence[Row]) -> tuple[PackingLaw, Array]:
    """ln(lost) + w ln 4 is linear in 1 / w^2 and in the logarithm of the vocabulary. Residuals are logs of ratios."""
    bits, vocab, lost = (
        np.array([row[name] for row in rows], np.float64) for name in ("bits_per_weight", "vocab", "bpb_lost")
    )
    left = np.stack([np.ones_like(bits), 1 / bits**2, np.log(vocab / 1024)], axis=1)
    right = np.log(lost) + bits * math.log(4)
    found, *_ = np.linalg.lstsq(left, right, rcond=None)
    c, k, g = (float(value) for value in found)
    return PackingLaw(c=math.exp(c), k=k, g=max(0.0, g)), right - left @ found


def fit_token_sizes(rows: Sequence[Row]) -> TokenSizes:
    """One row for each text and vocabulary."""
    known = {(row["text"], row["vocab"]): row for row in rows if row.get("bytes_per_token_measured", True)}
    hardness, vocab, size = (
        np.log([row[name] for row in known.values()]) for name in ("hardness", "vocab", "bytes_per_token")
    )
    left = np.stack([np.ones_like(vocab), vocab, -hardness], axis=1)
    (a, b, d), *_ = np.linalg.lstsq(left, size, rcond=None)
    return TokenSizes(a=float(a), b=float(b), d=float(d))


def fit_repeats(rows: Sequence[Row], log_parameters: Array) -> tuple[float, float, Array]:
    """R and O for texts that are repeated with the decay of a plan, with all other parameters as they are. Each text has a factor
    of its own. Residuals are logs of ratios."""
    cases, measured = make_cases(rows), np.log([row["bpb"] for row in rows])
    names = sorted({row["scored"] for row in rows})
    own = np.array([names.index(row["scored"]) for row in rows])
    repeats = [NAMES.index(name) for name in ("R", "O")]
    mean, width = (np.array(column) for column in zip(*(PRIORS[NAMES[at]] for at in repeats)))
    mean = np.concatenate([mean, np.zeros(len(names))])
    width = np.concatenate([width, np.full(len(names), SMALL_TEXT_SPREAD)])

    def predict(at: Array) -> Array:
        logs = log_parameters.copy()
        logs[repeats] = at[:2]
        found: Array = np.log(predict_score(logs, cases)) + at[2:][own]
        return found

    at, _ = _minimise(lambda at: np.concatenate([(predict(at) - measured) / REPEATED_ERROR, (at - mean) / width]), mean)
    worth, cost = np.exp(at[:2])
    return float(worth), float(cost), measured - predict(at)


def fit_cpu_texts(log_parameters: Array, sizes: TokenSizes) -> CpuTexts:
    """What the runs of the grids `small` and `middle` say, each grid by itself."""
    small, middle = (_read_file(path) for path in (SMALL_RUNS, MIDDLE_RUNS))
    small_R, small_O, _ = fit_repeats(small, log_parameters)
    middle_R, middle_O, _ = fit_repeats(middle, log_parameters)
    few = [row for row in small if row["vocab"] < FEW_TOKENS]
    shorter = [math.log(row["bytes_per_token"] / sizes.predict(row["vocab"], row["hardness"])) for row in few]
    share = [math.log(longer_tokens(row["vocab"])) for row in few]
    return CpuTexts(
        small_R=small_R, small_O=small_O, middle_R=middle_R, middle_O=middle_O, spread=PLANNED_SPREAD,
        few=float(np.mean(shorter) / np.mean(share)),
    )  # fmt: skip


def fit(
    rows: Sequence[Row], packing_rows: Sequence[Row], inflation: float = 1.0
) -> tuple[dict[str, Any], Array, Array]:
    """The contents of fit.json, and the residuals of scores and of packing."""
    score = fit_score(rows)
    residuals, factors = score.residuals, score.factors
    scored = {row["text"]: row["scored"] for row in rows if row["scored"].endswith(", validation")}
    kept = [
        *range(len(NAMES)),
        *(len(NAMES) + score.texts.index(name) for name in scored.values()),
        *range(len(score.logs) - len(OPTIONS), len(score.logs)),
    ]
    packing, packing_residuals = fit_packing(packing_rows)
    token_sizes = fit_token_sizes(rows)
    cpu_texts = fit_cpu_texts(score.logs[: len(NAMES)], token_sizes)
    cases = make_cases(rows)
    epochs = cases.tokens * cases.bytes_per_token / cases.text_bytes
    ranges = {name: [float(getattr(cases, name).min()), float(getattr(cases, name).max())] for name in FIELDS}
    errors = dict(zip((row["key"] for row in rows), residuals))
    tried = [row for row in rows if row["steps"] >= LONG_STEPS and not _is_repeated(row)] or list(rows)
    ranges["matrices"] = [float(edge(row["matrices"] for row in tried)) for edge in (min, max)]
    bits = [row["bits_per_weight"] for row in packing_rows]
    values = {
        "parameters": {name: float(value) for name, value in zip(NAMES, np.exp(score.logs))},
        "covariance_of_logs": score.covariance[np.ix_(kept, kept)].round(10).tolist(),
        "text_spread": NEW_TEXT_SPREAD,
        "texts": {text: factors[name] for text, name in scored.items()},
        "gpu_options": float(np.exp(score.logs[-2])),
        "cpu_windows": float(np.exp(score.logs[-1])),
        "scatter": SCATTER,
        "short_steps": SHORT_STEPS,
        "inflation": inflation,
        "packing": asdict(packing),
        "token_sizes": asdict(token_sizes),
        "tried": [[*(float(row[name]) for name in TRIED), round(float(errors[row["key"]]), 6)] for row in tried],
        "ranges": ranges | {"bits_per_weight": [min(bits), max(bits)], "epochs": [0.0, max(1.0, float(epochs.max()))]},
        "runs": len(rows),
        "cpu_texts": asdict(cpu_texts),
    }
    return values, residuals, packing_residuals


def describe(
    rows: Sequence[Row],
    packing_rows: Sequence[Row],
    values: dict[str, Any],
    left_out: Sequence[LeftOut],
    *residuals: Array,
) -> str:
    """The fit and every residual, as Markdown."""
    scores, packing = residuals
    lines = [
        "# The fit of parbank.plan",
        "",
        "Written by `python -m parbank.plan.fit` from the runs in this folder.",
        "",
    ]
    deviations = np.sqrt(np.diag(values["covariance_of_logs"]))
    lines += ["| parameter | value | factor of one deviation | prior |", "| --- | --- | --- | --- |"]
    for name, deviation in zip(NAMES, deviations):
        prior = math.exp(PRIORS[name][0])
        lines.append(f"| {name} | {values['parameters'][name]:.4g} | {math.exp(deviation):.2f} | {prior:.3g} |")
    repeated = np.array([_is_repeated(row) for row in rows])
    lines += [""]
    for kind, errors in (("runs", scores[~repeated]), ("runs that repeat a small text", scores[repeated])):
        if errors.size:
            rms, worst = np.sqrt(np.mean(errors**2)), np.abs(errors).max()
            lines.append(f"Residuals of {errors.size} {kind}: {rms:.4f} bits per byte RMS, {worst:.4f} at worst.")
    for kind, path in (("small", SMALL_RUNS), ("middle", MIDDLE_RUNS)):
        repeats = _read_file(path)
        worth, cost, errors = fit_repeats(repeats, np.log([values["parameters"][name] for name in NAMES]))
        lines += [
            "",
            f"For {kind} texts on a CPU R is {worth:.3g} and O {cost:.3g}, fitted to these runs alone. Each text has a factor.",
            "",
            f"| run of a {kind} text | measured | log(measured / predicted) |",
            "| --- | --- | --- |",
        ]
        lines += [f"| {row['key']} | {row['bpb']:.4f} | {found:+.3f} |" for row, found in zip(repeats, errors)]
    lines += [""]
    lines += ["| run | measured | measured - predicted |", "| --- | --- | --- |"]
    lines += [f"| {row['key']} | {row['bpb']:.4f} | {found:+.4f} |" for row, found in zip(rows, scores)]
    lines += [
        "",
        "Runs that were left out of the fit: alone, and with all runs of their device that have more than "
        f"{SHORTER:.0%} of their tokens.",
        f"Errors are {values['inflation']:.2f} times what the fit alone expects; a plan's interval is widened by that.",
        "",
        "| run | alone: error | expected | among longer runs: error | expected |",
        "| --- | --- | --- | --- | --- |",
    ]
    for one in left_out:
        cells = (f"{error:+.4f} | {deviation:.4f}" for error, deviation in (one.alone, one.edge))
        lines.append(f"| {one.key} | {' | '.join(cells)} |")
    lines += ["", "| packing | bits per weight | lost | measured / predicted |", "| --- | --- | --- | --- |"]
    for row, found in zip(packing_rows, packing):
        lines.append(f"| {row['key']} | {row['bits_per_weight']:.2f} | {row['bpb_lost']:.5f} | {math.exp(found):.2f} |")
    return "\n".join(lines) + "\n"


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("more", nargs="*", type=Path, help="files of JSON rows, or folders of studies")
    parser.add_argument("--out", type=Path, default=DATA, help="folder for fit.json and residuals.md")
    given = parser.parse_args(arguments)
    try:
        rows, packing_rows = read_rows([*RUNS, *given.more])
    except ParbankError as error:
        parser.error(str(error))
    left_out = leave_out(rows)
    values, *residuals = fit(rows, packing_rows, inflate(left_out))
    write_file(given.out / "fit.json", (json.dumps(values, indent=1) + "\n").encode())
    text = describe(rows, packing_rows, values, left_out, *residuals)
    write_file(given.out / "residuals.md", text.encode())
    print(text)


if __name__ == "__main__":
    main()
