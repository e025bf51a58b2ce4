"""Loads benchmark runs and turns them into tables, figures and a report."""
