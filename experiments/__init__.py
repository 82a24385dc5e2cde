"""Experiments on live traffic: the file, the split, the statistics; nothing here knows SGLang."""
