"""What a recipe needs of the hub: brought at a resolved commit, recorded, and found again without a network.

Read ``pieces`` (what is needed), ``records`` (what is here), ``sources`` (what a run uses), ``download`` (how it
comes).
"""
