"""Index arithmetic that the interpreter and the compiler do alike."""
