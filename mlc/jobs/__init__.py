"""Many models tuned for many targets, as a file says: what is in it, how it runs, what it has brought."""
