"""The exercises' checks, one file per lesson."""
