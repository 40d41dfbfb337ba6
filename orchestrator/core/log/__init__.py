"""The journal's records: print, parse, compact, count. Pure."""
