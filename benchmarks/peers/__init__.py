"""Public work that parbank is measured beside: our drivers, never its code.

`python benchmarks/peers/catalogue.py` brings the code into .peers/, which git ignores.
"""
