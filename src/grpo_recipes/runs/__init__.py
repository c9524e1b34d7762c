"""Write, find and read run directories, and judge what they hold."""
