"""Train on your own text and see what came out: python examples/train_on_text.py FOLDER [MINUTES]

Reads every UTF-8 text file in the folder. The run is in runs/own-text, which must not hold a run yet.
"""

import sys

import parbank

if len(sys.argv) < 2:
    raise SystemExit(__doc__)
folder, minutes = sys.argv[1], float(sys.argv[2]) if len(sys.argv) > 2 else 3.0
run = parbank.train(recipe="demo", data=f"text:{folder}", minutes=minutes, max_bytes=2_000_000, out="runs/own-text")
summary = run.summary
print(f"{summary['steps']} steps in {summary['train_seconds']:.0f} s, {summary['artifact_bytes']:,} bytes")
print(
    f"{summary['val_bpb']:.3f} bits per byte; " + str({k: round(v, 3) for k, v in summary["compressors_bpb"].items()})
)
print(run.model.sample("", tokens=100))
