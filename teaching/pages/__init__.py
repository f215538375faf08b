"""What the site's pages are made of: text, styles, scripts, and explorers without a kernel."""
