"""How fast the operations are, on one GPU: contenders on the same inputs, judged before they are timed.

``dspark bench`` (or ``python -m benchmarks`` in a checkout) measures; ``python -m benchmarks.report RECORD`` writes
README.md and its pictures from a record.
"""
