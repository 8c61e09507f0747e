"""Here is how the text ends: what followed it before? Token ids in, what followed them out.

Useful for drafting. Knows no text, no trees of the engine, no models, and never writes except through `format`.
"""
