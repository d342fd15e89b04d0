"""All changes to upstream's names, one reason each; `python -m hydraulis_patches` lists them."""
