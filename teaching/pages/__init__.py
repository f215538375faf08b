"""The parts of the site's pages: text, styles, scripts, and explorers without a kernel."""
