"""GGUF files of the llama architecture: read (`file`), their shape (`config`), their tokenizer (`tokenizer`)."""
