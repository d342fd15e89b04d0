"""Between checkpoints and Hugging Face folders: Llama, Qwen2 and Qwen3, parameters only."""
