"""ModeBench: generated problems with several correct answers, to measure whether training keeps more than one of them.

``countdown`` and ``graph_coloring`` are the two tasks. ``dataset`` makes rows and splits, judges completions and scores
them. ``evaluate.benchmarks`` compares models. No torch.
"""
