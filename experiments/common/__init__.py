"""Parts that the experiments share: start, statistics, timing, tables, figures."""
