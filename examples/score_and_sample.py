"""Score a text and continue it: python examples/score_and_sample.py MODEL FILE

MODEL is a .pbk file, a checkpoint or a run's folder. The score is in bits per byte, by three methods.
"""

import sys
from pathlib import Path

import parbank

if len(sys.argv) != 3:
    raise SystemExit(__doc__)
model, text = parbank.load(sys.argv[1]), Path(sys.argv[2])
print(model)
for method, settings in (("chunked", {}), ("sliding", {"stride": model.context // 4}), ("streaming", {})):
    score = model.score(text, method=method, **settings)
    print(f"{method:10} {score.bpb:.4f} bits per byte over {score.bytes:,} bytes")

opening = text.read_text()[:80]
print(opening + "|" + model.sample(opening, tokens=60, temperature=0.7, seed=1))

next_token = model.logits(model.tokenizer.encode(opening))[-1].softmax(-1)
likeliest = [model.tokenizer.decode([int(i)]) for i in next_token.topk(5).indices]
print("likeliest next tokens:", likeliest)
