"""How new weights reach the server: one file per bridge, and the guard that proves they arrived."""
