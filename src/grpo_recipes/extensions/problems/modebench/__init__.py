"""ModeBench: problems with several right answers, made on the spot, to see whether training keeps more than one.

Read ``countdown`` and ``graph_coloring`` (the two tasks), ``dataset`` (rows, splits, right or wrong,
which answer it is, the scores of many); ``evaluate.benchmarks`` compares. No torch.
"""
