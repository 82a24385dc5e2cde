"""From numbers to choices: selection, ranks, statistics, division among layers."""
