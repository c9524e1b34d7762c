"""``report.html``: a run, or several side by side, as one page that needs nothing else. No torch.

``single`` and ``compare`` put the pages together; ``read`` reads a run directory; ``chart`` and ``blocks`` draw.
"""
