"""Explorers: sliders around functions that also work without them."""
