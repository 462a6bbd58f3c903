"""Output for people: tables, plots, progress of tuning runs, HTML reports."""
