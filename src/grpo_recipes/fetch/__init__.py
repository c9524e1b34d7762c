"""Find and download the models and datasets of a recipe.

``assets`` lists the models and datasets of a recipe and finds them on this machine. ``download`` fetches missing ones.
``hub`` tests the connection to the hub.
"""
