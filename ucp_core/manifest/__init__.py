"""The document that defines a checkpoint: parse, validate, print, merge. Pure."""
