"""Studies: does a change pay, on this machine, and how sure is that?

from parbank.study.engine import run_study
from parbank.study.ship import make_study

report = run_study(make_study("published-training", budget="30s", seeds=4, data="text:books"), "runs/published")
print(report.text())
"""
