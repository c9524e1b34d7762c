"""The documentation: its pages as plain Markdown, with tables made from the code."""
