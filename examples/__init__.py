"""Recipes and their parts; `specactor recipes` lists them."""
