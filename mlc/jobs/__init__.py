"""Jobs files: many models tuned for many targets."""
