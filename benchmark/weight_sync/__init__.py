"""`python -m benchmark.weight_sync`: every way to bring new weights into one engine, side by side in one run.

The same random model, the same engine and the same trainer process serve all ways, which take turns, so that a noisy
machine hurts all of them alike: compare ratios inside one run. `ways.py` has the ways, `ceiling.py` what the machine
gives at best, `stream.py` what a running request feels, `results.py` and `plot.py` show it.
"""
