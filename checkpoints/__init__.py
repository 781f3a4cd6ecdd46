"""Reading checkpoints: Hugging Face safetensors and GGUF files, streamed tensor by tensor onto devices."""
