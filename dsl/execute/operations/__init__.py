"""Operations of the language on these tensors."""
