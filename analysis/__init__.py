"""Load benchmark runs, and write tables, figures and a report about them."""
