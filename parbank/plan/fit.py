"""Fits the laws to runs, and writes the fit and its residuals beside the data.

    python -m parbank.plan.fit                      from data/runs.json and packing.json to data/fit.json and data/residuals.md
    python -m parbank.plan.fit MORE... --out DIR    with more runs: files of rows, or folders of studies

A fit is the most probable one: least squares with the priors of laws.PRIORS, so that a parameter that the runs say little
about stays near published values. The same information gives the covariance, and with it how certain a prediction is.
`PARBANK_PLAN_FIT=FILE` makes plans use another fit, for a machine or a kind of text of your own.
"""

import argparse
import json
import math
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from parbank.errors import ConfigError
from parbank.plan.laws import (
    DATA,
    FIELDS,
    NAMES,
    PRIORS,
    Array,
    Cases,
    Packing,
    TokenSizes,
    differentiate,
    predict_score,
)
from parbank.plan.studies import read_study_rows

Row = dict[str, Any]
# Bytes of text below which a run is left out: a model learns some ten documents by heart, and no law of ours says how well.
LEAST_TEXT = 500_000
LEAST_STEPS = 64  # of a run that counts: a shorter one has hardly a schedule
RUNS = (DATA / "runs.json", DATA / "packing.json")
# The scatter to expect about a law with so few parameters; seeds alone differ by less (0.0007 on a GPU, 0.003 on short runs).
SCATTER = 0.01
# A run of so many steps counts with twice that scatter, a shorter one with more: early losses do not rank models.
SHORT_STEPS = 300
# Runs of so many steps say which sizes of models were tried in earnest.
LONG_STEPS = 500
# How far a text's score is from what zlib says of it, as a logarithm: the factors that the fit finds lie within 0.1 of 1.
TEXT_SPREAD = 0.08
# A deviation of residuals from less runs than this would be luck.
_LEAST_DEVIATION = 0.005


def read_rows(paths: Sequence[Path]) -> tuple[list[Row], list[Row]]:
    """Rows of scores, and rows of packing, from files of JSON and folders of studies."""
    rows: list[Row] = []
    for path in paths:
        if path.is_dir():
            rows += read_study_rows(path)
            continue
        try:
            text = path.read_text(encoding="utf-8").strip()
            rows += json.loads(text) if text.startswith("[") else [json.loads(line) for line in text.splitlines()]
        except (OSError, ValueError) as error:
            raise ConfigError(
                f"cannot read runs from {path}: {error}; give a JSON list, JSON lines, or the folder of a study"
            ) from error
    scores = [row for row in rows if "bpb" in row and not row.get("extra")]
    scores = [
        row for row in scores if row.get("text_bytes", LEAST_TEXT) >= LEAST_TEXT and row.get("steps", 0) >= LEAST_STEPS
    ]
    for row in scores:
        if lacking := [name for name in (*FIELDS, "key", "scored", "steps") if name not in row]:
            raise ConfigError(
                f"the run {row.get('key', row)} lacks {', '.join(lacking)}; benchmarks/plan_runs.py writes them"
            )
    return scores, [row for row in rows if "bits_per_weight" in row]


def make_cases(rows: Sequence[Row]) -> Cases:
    return Cases.of(**{name: np.array([row[name] for row in rows], np.float64) for name in FIELDS})


def fit_score(rows: Sequence[Row], scatter: float = SCATTER) -> tuple[Array, Array, Array, dict[str, float]]:
    """Log parameters, their covariance, residuals (measured minus predicted) and factors, by Levenberg and Marquardt.

    A text may be easier or harder than zlib says, and so may the part of it that was scored. So every scored part has a factor
    of its own, fitted with the rest. A new text has none, which makes its prediction less certain.
    """
    cases, measured = make_cases(rows), np.array([row["bpb"] for row in rows])
    names = sorted({row["scored"] for row in rows})
    errors_expected = scatter * (1 + SHORT_STEPS / (cases.tokens / cases.batch_tokens))
    own = np.array([names.index(row["scored"]) for row in rows])
    mean, width = (np.array(column) for column in zip(*PRIORS.values()))
    mean = np.concatenate([mean, np.zeros(len(names))])
    width = np.concatenate([width, np.full(len(names), TEXT_SPREAD)])

    def predict(log: Array) -> Array:
        found: Array = predict_score(log[: len(NAMES)], cases) * np.exp(log[len(NAMES) :][own])
        return found

    def errors(log: Array) -> Array:
        return np.concatenate([(predict(log) - measured) / errors_expected, (log - mean) / width])

    at, damping = mean.copy(), 1.0
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
    covariance: Array = np.linalg.inv(slopes.T @ slopes).astype(np.float64)[: len(NAMES), : len(NAMES)]
    factors = {name: float(factor) for name, factor in zip(names, np.exp(at[len(NAMES) :]))}
    return at[: len(NAMES)], covariance, measured - predict(at), factors


def fit_packing(rows: Sequence[Row]) -> tuple[Packing, Array]:
    """ln(lost) + w ln 4 is a straight line in 1 / w^2. Residuals are logs of ratios."""
    bits, lost = (np.array([row[name] for row in rows], np.float64) for name in ("bits_per_weight", "bpb_lost"))
    left = np.stack([np.ones_like(bits), 1 / bits**2], axis=1)
    right = np.log(lost) + bits * math.log(4)
    (log_c, k), *_ = np.linalg.lstsq(left, right, rcond=None)
    return Packing(c=float(np.exp(log_c)), k=float(k)), right - left @ np.array([log_c, k])


def fit_token_sizes(rows: Sequence[Row]) -> TokenSizes:
    """One row for each text and vocabulary."""
    known = {(row["text"], row["vocab"]): row for row in rows if row.get("bytes_per_token_measured", True)}
    hardness, vocab, size = (
        np.log([row[name] for row in known.values()]) for name in ("hardness", "vocab", "bytes_per_token")
    )
    left = np.stack([np.ones_like(vocab), vocab, -hardness], axis=1)
    (a, b, d), *_ = np.linalg.lstsq(left, size, rcond=None)
    return TokenSizes(a=float(a), b=float(b), d=float(d))


def fit(rows: Sequence[Row], packing_rows: Sequence[Row]) -> tuple[dict[str, Any], Array, Array]:
    """The contents of fit.json, and the residuals of scores and of packing."""
    log, covariance, residuals, factors = fit_score(rows)
    validation = {row["text"]: factors[row["scored"]] for row in rows if row["scored"].endswith(", validation")}
    packing, packing_residuals = fit_packing(packing_rows)
    cases = make_cases(rows)
    epochs = cases.tokens * cases.bytes_per_token / cases.text_bytes
    ranges = {name: [float(getattr(cases, name).min()), float(getattr(cases, name).max())] for name in FIELDS}
    tried = [row["matrices"] for row in rows if row["steps"] >= LONG_STEPS] or [row["matrices"] for row in rows]
    ranges["matrices"] = [float(min(tried)), float(max(tried))]
    bits = [row["bits_per_weight"] for row in packing_rows]
    values = {
        "parameters": {name: float(value) for name, value in zip(NAMES, np.exp(log))},
        "covariance_of_logs": covariance.round(10).tolist(),
        "text_spread": TEXT_SPREAD,
        "texts": validation,
        "deviation": max(_LEAST_DEVIATION, float(np.sqrt(np.mean(residuals**2)))),
        "packing": asdict(packing),
        "token_sizes": asdict(fit_token_sizes(rows)),
        "ranges": ranges | {"bits_per_weight": [min(bits), max(bits)], "epochs": [0.0, max(1.0, float(epochs.max()))]},
        "runs": len(rows),
    }
    return values, residuals, packing_residuals


def describe(rows: Sequence[Row], packing_rows: Sequence[Row], values: dict[str, Any], *residuals: Array) -> str:
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
    rms, worst = np.sqrt(np.mean(scores**2)), np.abs(scores).max()
    lines += ["", f"Residuals of {len(rows)} runs: {rms:.4f} bits per byte RMS, {worst:.4f} at worst.", ""]
    lines += ["| run | measured | measured - predicted |", "| --- | --- | --- |"]
    lines += [f"| {row['key']} | {row['bpb']:.4f} | {found:+.4f} |" for row, found in zip(rows, scores)]
    lines += ["", "| packing | bits per weight | lost | measured / predicted |", "| --- | --- | --- | --- |"]
    for row, found in zip(packing_rows, packing):
        lines.append(f"| {row['key']} | {row['bits_per_weight']:.2f} | {row['bpb_lost']:.5f} | {math.exp(found):.2f} |")
    return "\n".join(lines) + "\n"


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("more", nargs="*", type=Path, help="files of JSON rows, or folders of studies")
    parser.add_argument("--out", type=Path, default=DATA, help="folder for fit.json and residuals.md")
    given = parser.parse_args(arguments)
    rows, packing_rows = read_rows([*RUNS, *given.more])
    values, *residuals = fit(rows, packing_rows)
    given.out.mkdir(parents=True, exist_ok=True)
    (given.out / "fit.json").write_text(json.dumps(values, indent=1) + "\n", encoding="utf-8")
    text = describe(rows, packing_rows, values, *residuals)
    (given.out / "residuals.md").write_text(text, encoding="utf-8")
    print(text)


if __name__ == "__main__":
    main()
