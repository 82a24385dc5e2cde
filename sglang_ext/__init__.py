"""The plugin that serves policies inside SGLang. The only package that imports sglang."""
