"""Conversion from and to Hugging Face folders: parameters of Llama, Qwen2 and Qwen3."""
