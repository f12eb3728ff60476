"""What the experiments share: how they start, statistics, timing, tables, figures."""
