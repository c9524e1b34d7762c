"""``report.html``: a run, or a comparison of several runs, as one self-contained page. No torch.

``read`` reads a run directory, ``pages`` and ``page`` make the pages from ``templates/``, ``run_charts`` selects the
metrics to draw, and ``chart`` draws them.
"""
