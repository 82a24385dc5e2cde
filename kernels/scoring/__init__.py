"""From numbers to choices: selection, order, statistics, division among layers."""
