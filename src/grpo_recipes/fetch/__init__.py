"""Find and download the models and datasets of a recipe.

``assets`` lists what a recipe needs and finds it on this machine, ``download`` uses the hub's clients, and ``hub``
checks whether the hub answers.
"""
