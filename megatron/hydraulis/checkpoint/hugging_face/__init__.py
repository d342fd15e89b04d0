"""Conversion from and to Hugging Face folders: parameters of seven families."""
