"""ModeBench: problems with several right answers, made on the spot, to see whether training keeps more than one.

Read ``countdown`` and ``graph_coloring`` (the two tasks), ``dataset`` (rows, splits), ``verify`` (right or wrong, and
which answer it is), ``metrics``; ``evaluate.baselines`` compares. No torch.
"""
