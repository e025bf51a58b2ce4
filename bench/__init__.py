"""Run training scripts, and measure how long they take."""
