"""The plugin's face to SGLang and the operator: SGLang's names, options, what is refused."""
