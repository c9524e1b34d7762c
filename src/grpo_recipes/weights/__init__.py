"""How new weights reach the server: the bridges, and the guard that proves they arrived."""
