"""SGLang's attention backends and graphs, reading compressed entries too."""
