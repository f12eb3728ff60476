"""What studies share: start, random inputs, statistics, timing, tables, figures."""
