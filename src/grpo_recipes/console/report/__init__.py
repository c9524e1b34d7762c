"""``report.html``: a run, or several side by side, as one page that needs nothing else. No torch.

``read`` reads a run directory, ``pages`` and ``page`` make the pages from ``templates/``, ``run_charts`` says which
metrics are drawn, ``chart`` draws.
"""
