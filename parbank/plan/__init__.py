"""From minutes, megabytes and text to a config: laws fitted to committed runs, and a probe of the machine.

laws.py      bits per byte against parameters, tokens, repeated text, vocabulary, batch and bits per weight
fit.py       fits the laws to data/runs.json: `python -m parbank.plan.fit`
texts.py     how much text there is, and how hard it is
probe.py     seconds per step and bytes of memory against the shape, measured on this machine
apart.py     compiles the kernels of the probe in processes, while the text is read
choose.py    the best of a fixed set of candidates
describe.py  the plan as text
"""
