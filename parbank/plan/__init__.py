"""From minutes, megabytes and text to a config: laws fitted to measured runs, and a probe of the machine.

laws.py        bits per byte against parameters, tokens, repeated text, vocabulary, tables, batch and bits per weight
fit.py         fits the laws to the runs in data/: `python -m parbank.plan.fit`
texts.py       how much text there is, and how hard it is
machine.py     seconds per step and bytes of memory against the shape, by six rates
probe.py       measures the rates on this machine
apart.py       compiles the kernels of the probe in processes, while the text is read
candidates.py  a fixed set of shapes, vocabularies, tables and batches
choose.py      the best of the candidates, and its whole config
notes.py       what a plan says of itself
describe.py    the plan as text
"""
